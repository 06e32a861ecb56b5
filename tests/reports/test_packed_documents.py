"""What users reported of packing in other tools, with our packs."""

import itertools
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models

import datasvc
from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import TokenLoader
from datasvc.shards.packing.best_fit import pack_documents
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.text.chat import ChatSource
from datasvc.trainer.recipes.models.document_attention import plan_documents
from datasvc.trainer.recipes.models.gpt import GPT

END = 9


@pytest.fixture
def ingest(tmp_path):
    """Return a function that makes a split of documents, and of a loss mask for each."""

    def make(documents, masks=None, name="documents"):
        folder = tmp_path / name
        folder.mkdir()
        columns = {"key": [f"d{number}" for number in range(len(documents))]}
        columns["tokens"] = (
            documents if isinstance(documents, pa.Array) else pa.array(documents, pa.list_(pa.int32()))
        )
        if masks is not None:
            columns["mask"] = masks if isinstance(masks, pa.Array) else pa.array(masks, pa.list_(pa.int8()))
        pq.write_table(pa.table(columns), folder / "documents.parquet")
        repo = datasvc.open(str(tmp_path / "repo"), create=not (tmp_path / "repo").exists())
        repo.datasets.ingest(str(folder), name)
        return repo.dataset(name)["train"]

    return make


def read(split, block, batch_size=1, **options):
    options = {"labels": "within", "documents": True, "tail": "short", "shuffle": None} | options
    with TokenLoader(
        split, batch_size=batch_size, training=True, pack="best-fit", block_tokens=block, **options
    ) as loader:
        return list(loader.numpy())


@pytest.mark.parametrize(
    ("lengths", "block"),
    [([121], 60), ([30] * 10 + [61], 60), ([7, 180, 3], 60)],
)
def test_a_document_of_several_blocks_is_cut_and_loses_no_token(ingest, lengths, block):
    """meta-pytorch/torchtune#1689: a document longer than twice the block ended with a RuntimeError."""
    tokens = iter(range(1, sum(lengths) + 1))
    documents = [list(itertools.islice(tokens, length)) for length in lengths]
    batches = read(ingest(documents), block)
    served = sorted(token for batch in batches for token in batch.tokens.reshape(-1).tolist() if token)
    assert served == sorted(itertools.chain(*documents))


def test_a_document_that_does_not_fit_the_pack_in_progress_is_in_another_one():
    """ByteDance-Seed/Bagel#308: of lengths 6, 6, 3, 6 with a limit of 10, the second was in no pack."""
    packed = pack_documents(np.array([6, 6, 3, 6]), 10)
    assert sorted(packed.rows.tolist()) == [0, 1, 2, 3]
    assert sorted(packed.counts.tolist()) == [1, 1, 2]


def test_the_documents_left_at_the_end_are_packed(ingest):
    """NVIDIA/Megatron-Energon#114: at the end of the data the buffer of the packer was not empty."""
    documents = [[number + 1] * 3 for number in range(23)]
    batches = read(ingest(documents), 8, batch_size=3, tail="short")
    served = [token for batch in batches for token in batch.tokens.reshape(-1).tolist() if token]
    assert sorted(served) == sorted(itertools.chain(*documents))


def test_the_last_token_of_a_document_does_not_predict_the_next_document(ingest):
    """meta-pytorch/torchtune#2613, pytorch/torchtitan#4075: labels over the border."""
    (batch,) = read(ingest([[1, 2, 3], [4, 5], [6, 7, 8]]), 8)
    labels = dict(zip(batch.tokens[0].tolist(), batch.labels[0].tolist(), strict=True))
    assert labels == {1: 2, 2: 3, 3: -100, 4: 5, 5: -100, 6: 7, 7: 8, 8: -100}


def test_documents_of_a_pack_do_not_attend_to_each_other(ingest):
    """huggingface/trl#784, #3067: samples of a pack saw each other, and positions went on."""
    torch.manual_seed(0)
    model = GPT(10, context=8, layers=1, heads=1, width=8, dropout=0.0).eval()
    logits = {}
    for number, first in enumerate(([1, 2, 3], [3, 1, 1])):
        (batch,) = read(ingest([[*first], [4, 5, 6, 7]], name=f"d{number}"), 8)
        assert sorted(batch.position_ids[0, batch.document_ids[0] >= 0].tolist()) == [0, 0, 1, 1, 2, 2, 3]
        tensors = {name: torch.from_numpy(getattr(batch, name)) for name in ("document_ids", "position_ids")}
        found = model(torch.from_numpy(batch.tokens), **tensors)[0]
        logits[number] = found[torch.from_numpy(batch.tokens[0] >= 4)]
    assert torch.allclose(logits[0], logits[1])


def test_a_loss_mask_holds_in_packs(ingest):
    """huggingface/trl#3728: with packing, the mask of the assistant's tokens had no effect."""
    (batch,) = read(ingest([[1, 2, 3, 4], [5, 6, 7]], [[0, 0, 1, 1], [0, 0, 1]]), 8, loss_mask="mask")
    labels = dict(zip(batch.tokens[0].tolist(), batch.labels[0].tolist(), strict=True))
    assert {token: label for token, label in labels.items() if label != -100} == {2: 3, 3: 4, 6: 7}


def test_a_token_after_an_end_token_inside_a_document_keeps_its_loss(ingest):
    """NVIDIA-NeMo/Megatron-Bridge#5213: labels after an end token between turns were cleared."""
    (batch,) = read(ingest([[1, 2, END, 3, 4, END]], [[1] * 6]), 8, loss_mask="mask")
    assert batch.labels[0, :6].tolist() == [2, END, 3, 4, END, -100]


def test_samples_without_a_loss_mask_do_not_shift_those_of_others(ingest):
    """allenai/OLMo-core#416: masks of documents with and without one were joined out of place."""
    split = ingest([[1, 2, 3], [4, 5, 6]], [[1, 1, 1], None])
    with pytest.raises(BadSampleError, match=r"loss mask of 1 document .* such as 0 for 3"):
        split.packed(8, loss_mask="mask")
    with pytest.raises(ConfigError, match="expected a column of lists"):
        ingest([[1, 2]], name="plain").packed(8, loss_mask="mask")


def test_tokens_and_loss_masks_of_one_size_are_packed(ingest):
    """Lists of one size, as arrays are ingested: the packs were stored, and then the loader refused the mask."""
    tokens, masks = (
        pa.array(values, pa.list_(pa.int32(), 3)) for values in ([[1, 2, 3], [4, 5, 6]], [[0, 0, 1]] * 2)
    )
    (batch,) = read(ingest(tokens, masks), 6, loss_mask="mask")
    assert batch.labels[0].tolist() == [-100, 3, -100, -100, 6, -100]


def test_a_resume_repeats_and_loses_no_document(ingest):
    """pytorch/torchtitan#3008: the document that waited for the next pack was lost at a resume."""
    split = ingest([[number] * (1 + number % 5) for number in range(1, 60)]).packed(6)
    options = {"batch_size": 2, "training": True, "tail": "short", "seed": 1}
    with TokenLoader(split, **options) as loader:
        whole = [batch.keys for batch in loader.numpy()]
    for stop in range(len(whole)):
        with TokenLoader(split, **options) as loader, TokenLoader(split, **options) as resumed:
            before = [batch.keys for batch in itertools.islice(loader.numpy(), stop)]
            resumed.load_state_dict(loader.state_dict())
            assert before + [batch.keys for batch in resumed.numpy()] == whole


def test_a_mask_of_a_conversation_that_is_cut_holds_in_both_parts(ingest):
    """huggingface/transformers#34494: a message of the assistant that was cut had a mask of zeros."""
    batches = read(ingest([[1, 2, 3, 4, 5, 6, 7, 8]], [[0, 0, 0, 1, 1, 1, 1, 1]]), 5, loss_mask="mask")
    labels = {label for batch in batches for label in batch.labels.reshape(-1).tolist() if label != -100}
    assert labels == {4, 5, 7, 8}


def test_every_token_of_a_batch_is_in_a_document_of_the_attention(ingest):
    """pytorch/pytorch#186786: tokens after the last bound of `cu_seqlens` gave gradients of NaN."""
    for documents in ([[1, 2, 3], [4, 5]], [[1]], [[1, 2, 3, 4, 5, 6, 7, 8]]):
        (batch,) = read(ingest(documents, name=f"d{len(documents)}{len(documents[0])}"), 8)
        plan = plan_documents(torch.from_numpy(batch.document_ids))
        bounds = [0, 8] if plan is None else plan.cu_seqlens.tolist()
        assert bounds == batch.cu_seqlens.tolist()
        assert bounds[-1] == batch.tokens.size


def test_a_template_that_ends_turns_with_the_next_message_is_named(tmp_path):
    """huggingface/trl#5988: the end of the assistant's turn was in the next message, and models did not stop."""
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    template = tmp_path / "chat_template.jinja"
    options = SourceOptions(chat_template=str(tmp_path))
    for end, context in (
        ("</end>", nullcontext()),
        ("", pytest.warns(RuntimeWarning, match="does not learn to stop")),
    ):
        template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}" + end + "{% endfor %}")
        with context:
            ChatSource.list(str(tmp_path / "chats.jsonl"), options)

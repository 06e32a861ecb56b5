"""What the GPT computes: who sees whom, and that it learns."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.models.gpt import GPT, make_mask, mask_documents
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, BLOCK = 11, 12


def make_gpt(**options):
    torch.manual_seed(0)
    return GPT(VOCABULARY, **{"context": BLOCK, "layers": 2, "heads": 2, "width": 16, **options})


def draw_tokens(batch=2, block=BLOCK, seed=0):
    return torch.randint(VOCABULARY, (batch, block), generator=torch.Generator().manual_seed(seed))


def pack(sizes):
    """Return the document and position ids of one block of documents, as a TokenBatch has them."""
    documents = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    return torch.from_numpy(documents)[None], torch.from_numpy(positions)[None]


@examples(20)
@given(place=st.integers(0, BLOCK - 1), seed=st.integers(0, 99), documents=st.booleans())
def test_changing_a_token_never_changes_earlier_logits(place, seed, documents):
    model = make_gpt().eval()
    tokens = draw_tokens(seed=seed)
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + 1) % VOCABULARY
    ids = pack([5, 7])[0].expand(2, -1) if documents else None
    with torch.no_grad():
        before, after = model(tokens, document_ids=ids), model(changed, document_ids=ids)
    torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
    assert (after[:, place] - before[:, place]).abs().max() > 1e-4


@examples(20)
@given(cuts=st.sets(st.integers(1, BLOCK - 1)), seed=st.integers(0, 99))
def test_a_packed_document_has_the_logits_that_it_has_alone(cuts, seed):
    model = make_gpt().eval()
    bounds = [0, *sorted(cuts), BLOCK]
    tokens = draw_tokens(batch=1, seed=seed)
    documents, positions = pack(np.diff(bounds))
    with torch.no_grad():
        packed = model(tokens, document_ids=documents, position_ids=positions)
        alone = [model(tokens[:, start:stop]) for start, stop in pairwise(bounds)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_the_mask_lets_each_token_see_its_own_document_up_to_itself():
    mask = mask_documents(torch.tensor([[0, 0, 1, -1]], dtype=torch.int32))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_part_of_the_queries_has_its_rows_of_the_mask_and_no_others_in_memory():
    documents, _ = pack([1, 3, BLOCK - 4])
    whole = mask_documents(documents)
    part = mask_documents(documents, start=2, num_queries=3)
    torch.testing.assert_close(part, whole[:, :, 2:5])
    split = SimpleNamespace(start=2, size=BLOCK // 2)
    for ids in (documents, None):
        mask = make_mask(ids, 2, split, torch.device("cpu"))
        torch.testing.assert_close(
            mask, mask_documents(torch.zeros_like(documents) if ids is None else ids)[:, :, 2:4]
        )
        assert mask.untyped_storage().nbytes() == 2 * BLOCK


def test_one_document_and_no_documents_are_the_same():
    model = make_gpt().eval()
    tokens = draw_tokens()
    documents, positions = pack([BLOCK])
    with torch.no_grad():
        plain = model(tokens)
        masked = model(tokens, document_ids=documents.expand(2, -1), position_ids=positions.expand(2, -1))
    torch.testing.assert_close(masked, plain)


def test_places_tell_equal_tokens_apart():
    logits = make_gpt().eval()(torch.full((1, 4), 3))
    assert (logits[0, 0] - logits[0, 1]).abs().max() > 1e-4


def test_a_tiny_gpt_learns_a_cycle():
    model = make_gpt(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(BLOCK + 1) + torch.arange(8)[:, None]) % VOCABULARY
    losses = []
    for _ in range(40):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(VOCABULARY), abs=0.1)  # it begins with knowing nothing
    assert losses[-1] < 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_reach_each_parameter(tied):
    model = make_gpt(tie_weights=tied)
    model(draw_tokens(batch=8)).square().mean().backward()
    unreached = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert unreached == []


def test_tied_weights_are_held_once():
    tied, untied = make_gpt(), make_gpt(tie_weights=False)
    sizes = [sum(value.numel() for value in model.state_dict().values()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == VOCABULARY * 16
    assert sizes[0] == sum(parameter.numel() for parameter in tied.parameters())


def test_weights_begin_as_gpt2s_do():
    torch.manual_seed(0)
    model = build_model("gpt", 5000, context=256, layers=8, heads=4, width=128)
    block = model.blocks[0]
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.positions.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert block.attention.project.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for end in (block.attention.out, block.mlp[2]):
        assert end.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # sixteen branches
        assert not end.bias.any()


def test_dropout_acts_in_training_only():
    model, tokens = make_gpt(dropout=0.5), draw_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("with_documents", [False, True])
def test_a_step_works_in_bfloat16_and_compiled(with_documents):
    model = make_gpt(dropout=0.0)
    documents = pack([5, 7])[0].expand(2, -1) if with_documents else None
    plain = model(draw_tokens(), document_ids=documents)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=not with_documents)
    torch.testing.assert_close(compiled(draw_tokens(), document_ids=documents), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(draw_tokens(), document_ids=documents)
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_block_longer_than_the_context_says_what_to_build():
    with pytest.raises(
        ConfigError, match=f"a block has 13 tokens; .* context of {BLOCK}: build the model with context=13"
    ):
        make_gpt()(draw_tokens(block=13))
    with pytest.raises(ConfigError, match=r"expected \[batch, block\]"):
        make_gpt()(torch.zeros(12, dtype=torch.int64))

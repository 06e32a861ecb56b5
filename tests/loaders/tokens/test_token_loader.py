"""TokenLoader with real shards: blocks, documents, and exactness over restarts."""

import dataclasses
import gc
import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache import Cache
from datasvc.errors import BadSampleError, ConfigError, StateMismatchError
from datasvc.loaders import DataRanks, OrderConfig, TokenFormat
from datasvc.loaders.core import pinned
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.tokens.token_loader import TokenLoader
from datasvc.repository import Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.shards import ingest, open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.text.tokens import TOKENIZER
from datasvc.shards.versions.combine import append_table
from datasvc.shards.versions.dataset import Split
from tests.examples import examples
from tests.shards.sources.text.test_tokens import TEXTS, train
from tests.shards.written_versions import TEXT_SCHEMA, write_table

BLOCK = 8
SIZES = [5, 1, 9, 3, 12, 2, 8]
KEY = pa.field("key", pa.string(), nullable=False)


def schema_of(kind=None, **others):
    fields = [KEY, pa.field("tokens", kind or pa.list_(pa.uint16(), BLOCK))]
    return shard_schema([*fields, *(pa.field(name, each) for name, each in others.items())])


def split_of(repository, table, name="train"):
    return Split(name, "tokens@1", repository, repository.objects.put(table.encode()).digest)


def write_split(repository, samples, schema):
    """Return a split of one shard; samples are dicts without keys."""
    keyed = [{"key": str(number), **sample} for number, sample in enumerate(samples)]
    return split_of(repository, write_table(repository.objects, [keyed], schema))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A split of forty blocks; block n of the table order is n * BLOCK, n * BLOCK + 1 ..."""
    repository = Repository.create(str(tmp_path_factory.mktemp("tokens") / "repo"))
    stops = np.cumsum(SIZES).tolist()
    shards = [
        [
            {"key": str(number), "tokens": list(range(number * BLOCK, (number + 1) * BLOCK))}
            for number in range(stop - size, stop)
        ]
        for size, stop in zip(SIZES, stops, strict=True)
    ]
    return split_of(repository, write_table(repository.objects, shards, schema_of()))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A repository with `text@1`, blocks of 16 tokens, and the documents of its split as lists of tokens."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = train(folder / "tokenizer.json")
    (folder / "train").mkdir()
    (folder / "train" / "lines.jsonl").write_text(
        "".join(json.dumps({"text": each}) + "\n" for each in TEXTS), encoding="utf-8"
    )
    repository = Repository.create(str(folder / "repo"))
    options = SourceOptions(tokenizer=str(folder / "tokenizer.json"), block_tokens=16)
    ingest(repository, str(folder / "train"), "text", source_options=options, keep_order=True)
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = [[*tokenizer.encode(each, add_special_tokens=False).ids, end] for each in TEXTS]
    return repository, documents, digest_of((folder / "tokenizer.json").read_bytes())


def make(split, batch_size=4, **options):
    return TokenLoader(split, **{"batch_size": batch_size, "training": False, **options})


def first(split, **options):
    with make(split, **options) as loader:
        return next(loader.numpy())


def numbers_of(batch):
    """Return which blocks of `numbered` a batch has, padding left out; each must be whole."""
    tokens = batch.tokens[batch.mask]
    assert (tokens == tokens[:, :1] + np.arange(BLOCK)).all()
    return (tokens[:, 0] // BLOCK).tolist()


def test_text_that_was_ingested_comes_back_document_by_document(text):
    repository, documents, digest = text
    split = next(iter(open_dataset(repository, "text@1").values()))
    with make(split, 3, documents=True, tail="short") as loader:
        assert (loader.block_tokens, loader.tokenizer) == (16, digest)
        batches = list(loader.numpy())
    found = [[]]
    for batch in batches:
        line, owners = batch.tokens.reshape(-1), batch.document_ids.reshape(-1)
        bounds = batch.cu_seqlens.tolist()
        assert batch.max_seqlen == np.diff(bounds).max()
        for start, stop in itertools.pairwise(bounds):
            assert batch.position_ids.reshape(-1)[start:stop].tolist() == list(range(stop - start))
            assert len(set(owners[start:stop].tolist())) == 1
            if owners[start] >= 0:
                found[-1] += line[start:stop].tolist()
                if found[-1][-1] == documents[0][-1]:
                    found.append([])
    assert found == [*documents, []]


def test_documents_are_found_by_the_token_that_ends_them_where_nothing_else_says(text):
    repository, documents, _ = text
    split = next(iter(open_dataset(repository, "text@1").values()))
    said = {"documents": True, "labels": "within", "batch_size": 5}
    with make(split, **said) as one, make(split, **said, tokens=TokenFormat(end=documents[0][-1])) as other:
        for known, derived in zip(one.numpy(), other.numpy(), strict=True):
            for name in ("document_ids", "position_ids", "cu_seqlens", "labels"):
                assert np.array_equal(getattr(known, name), getattr(derived, name)), name


def test_a_for_gives_tensors_and_unpacks_to_tokens_and_labels(numbered):
    with make(numbered, labels="across", documents=True, training=True, tokens=TokenFormat(end=3)) as loader:
        for batch in loader:
            tokens, labels = batch
            assert (tokens.dtype, tuple(tokens.shape)) == (torch.int64, (4, BLOCK))
            assert torch.equal(labels[:, :-1], tokens[:, 1:])
            assert (labels[:, -1] == -100).all()
            assert batch.document_ids.dtype == batch.cu_seqlens.dtype == torch.int32
            assert batch.length.tolist() == [BLOCK] * 4
            assert batch.mask.all()


def test_arrays_and_tensors_in_turns_go_on_in_one_epoch(numbered):
    with make(numbered, training=True) as loader, make(numbered, training=True) as other:
        arrays, tensors = loader.numpy(), iter(loader)
        for number, expected in enumerate(other.numpy()):
            batch = next(tensors if number % 2 else arrays)
            assert isinstance(batch.tokens, torch.Tensor if number % 2 else np.ndarray)
            assert np.array_equal(np.asarray(batch.tokens), expected.tokens)


def test_pinned_batches_are_those_of_the_run_and_only_they_are_copied(numbered, monkeypatch):
    copied = []
    monkeypatch.setattr(pinned, "can_pin", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copied.append(tuple(tensor.shape)) or tensor)
    with make(numbered, training=True) as loader:
        expected = [batch.tokens for batch in loader]
    with make(numbered, training=True) as loader:
        found = [next(loader.pin()).tokens]
        assert copied == [(4, BLOCK), (4,), (4,)]
        found.append(next(iter(loader)).tokens)
        assert len(copied) == 3
    assert all(map(torch.equal, found, expected[:2]))


@pytest.mark.slow
def test_the_path_of_arrays_does_not_import_torch(numbered):
    code = """
import sys
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import Split
from datasvc.loaders import TokenFormat, TokenLoader
split = Split("train", "tokens@1", Repository.open(sys.argv[1]), sys.argv[2])
tokens = TokenFormat(end=3)
with TokenLoader(split, batch_size=4, training=True, tokens=tokens, labels="across", documents=True) as loader:
    print(sum(int(batch.tokens.size) for batch in loader.numpy()), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, numbered.repository.url, numbered.digest]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [str(40 * BLOCK), "False"]


def test_what_a_holder_keeps_does_not_change_and_what_nobody_holds_is_used_again(numbered):
    with make(numbered, labels="across") as loader:
        held = [(batch, batch.tokens.copy(), batch.labels.copy()) for batch in loader.numpy()]
        assert all(
            np.array_equal(batch.tokens, tokens) and np.array_equal(batch.labels, labels)
            for batch, tokens, labels in held
        )
        view = torch.from_numpy(held[0][0].tokens)[1:, 2:]
        kept = view.clone()
        del held
        gc.collect()
        addresses = {batch.tokens.ctypes.data for batch in loader.numpy()}
        assert len(addresses) <= 4
        assert torch.equal(view, kept)


def with_seed(options, seed):
    if "order" in options:
        return {"order": dataclasses.replace(options["order"], seed=seed)}
    return {"seed": seed, **options}


@pytest.mark.slow
@examples(60)
@given(
    script=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.booleans()), min_size=1, max_size=5
    ),
    order=st.sampled_from([{}, {"order": OrderConfig(shuffle="windowed", lanes=3, block=4)}, {"shuffle": None}]),
    seed=st.integers(0, 3),
)
def test_read_saved_and_resized_at_random_each_block_of_the_epoch_is_served_once(numbered, script, order, seed):
    """Each entry of the script: ranks, batch size, steps, and whether more is read after the state was saved."""
    state, served = None, []
    for world_size, batch_size, steps, reads_on in [*script, (2, 3, 1000, False)]:
        states = []
        for rank in range(world_size):
            ranks = {"ranks": DataRanks(rank, world_size)}
            options = {"training": True, "tail": "pad", **ranks, **with_seed(order, seed)}
            with make(numbered, batch_size, **options) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                batches = loader.numpy()
                for _ in range(min(steps, 0 if loader.epoch else loader.steps_left)):
                    served += numbers_of(next(batches))
                states.append(json.loads(json.dumps(loader.state_dict())))
                if reads_on:
                    next(batches, None)
        assert all(each == states[0] for each in states)
        state = states[0]
    assert sorted(served) == list(range(sum(SIZES)))


def test_resumed_batches_equal_those_of_an_uninterrupted_run(numbered):
    options = {"training": True, "labels": "within", "documents": True, "tokens": TokenFormat(end=5)}
    with make(numbered, 6, **options) as loader:
        whole = [batch for _ in range(2) for batch in loader.numpy()]
    for taken in range(len(whole)):
        with make(numbered, 6, **options) as loader:
            found = []
            while len(found) < taken:
                for batch in loader.numpy():
                    found.append(batch)
                    if len(found) == taken:
                        break
            state = loader.state_dict()
        with make(numbered, 6, prefetch=3, **options) as loader:
            loader.load_state_dict(state)
            rest = list(loader.numpy()) + (list(loader.numpy()) if loader.epoch < 2 else [])
        for one, other in zip(whole[taken:], rest, strict=True):
            for name in ("tokens", "labels", "document_ids", "position_ids", "cu_seqlens", "positions"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_tensor_parallel_peers_get_identical_batches_and_data_ranks_share_each_global_batch(numbered):
    served = {}
    for data_rank in (0, 1):
        peers = []
        for _ in range(2):
            with make(numbered, 5, training=True, ranks=DataRanks(data_rank, 2)) as loader:
                peers.append([batch.tokens.tolist() for batch in loader.numpy()])
        assert peers[0] == peers[1]
        served[data_rank] = peers[0]
    with make(numbered, 10, training=True) as loader:
        assert [a + b for a, b in zip(served[0], served[1], strict=True)] == [
            batch.tokens.tolist() for batch in loader.numpy()
        ]


def test_samples_that_only_pad_have_no_real_tokens(numbered):
    with make(numbered, 16, labels="across", documents=True, tokens=TokenFormat(end=3)) as loader:
        *_, last = loader.numpy()
    assert last.mask.tolist() == [True] * 8 + [False] * 8
    assert last.length.tolist() == [BLOCK] * 8 + [0] * 8
    assert (last.labels[8:] == -100).all()
    assert (last.document_ids[8:] == -1).all()


def test_a_rank_may_get_an_empty_last_batch(numbered):
    with make(
        numbered, 13, tail="short", labels="within", ranks=DataRanks(2, 3), tokens=TokenFormat(end=3)
    ) as loader:
        sizes = [batch.tokens.shape for batch in loader.numpy()]
        assert sizes == [(13, BLOCK), (1, BLOCK)]
    with make(numbered, 39, tail="short", documents=True, ranks=DataRanks(0, 1), tokens=TokenFormat(end=3)) as loader:
        assert [len(batch.tokens) for batch in loader] == [39, 1]
    with make(numbered, 13, tail="short", documents=True, ranks=DataRanks(0, 3), tokens=TokenFormat(end=3)) as loader:
        *_, last = loader
    assert last.tokens.shape == (0, BLOCK)
    assert last.cu_seqlens.tolist() == [0]


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("by_folder", [True, False])
def test_through_a_cache_the_batches_are_the_same(numbered, tmp_path, staged, by_folder):
    with Cache(tmp_path / "cache", budget=64 << 20) as cache:
        if staged:
            cache.stage([numbered])
        place = str(cache.folder) if by_folder else cache
        with make(numbered, training=True, cache=place) as loader, make(numbered, training=True) as other:
            for one, expected in zip(loader.numpy(), other.numpy(), strict=True):
                assert np.array_equal(one.tokens, expected.tokens)


LISTS = [[1, 2, 3], [], [4], list(range(10, 18))]
RAGGED = {"tokens": TokenFormat(block_tokens=BLOCK)}
BLOBS = {"tokens": TokenFormat(block_tokens=BLOCK, dtype="uint16")}


@pytest.mark.parametrize(
    ("kind", "stored", "options"),
    [
        (pa.list_(pa.int32()), lambda tokens: tokens, {}),
        (pa.large_list(pa.uint64()), lambda tokens: tokens, {}),
        (
            pa.large_binary(),
            lambda tokens: np.array(tokens, "<u4").tobytes(),
            {"dtype": "uint32"},
        ),
    ],
    ids=["lists", "large lists", "blobs"],
)
def test_blocks_shorter_than_others_are_padded(repository, kind, stored, options):
    split = write_split(repository, [{"tokens": stored(each)} for each in LISTS], schema_of(kind))
    for pad in (None, 9):
        batch = first(split, tokens=TokenFormat(block_tokens=BLOCK, pad=pad, **options))
        assert batch.length.tolist() == [len(each) for each in LISTS]
        assert batch.tokens.tolist() == [each + [pad or 0] * (BLOCK - len(each)) for each in LISTS]


def test_stored_padding_stays_unless_another_is_asked_for(repository):
    samples = [{"tokens": [7] * BLOCK, "length": length} for length in (BLOCK, 3, 0, 1)]
    split = write_split(repository, samples, schema_of(length=pa.int32()))
    batch = first(split, labels="across")
    assert batch.length.tolist() == [BLOCK, 3, 0, 1]
    assert (batch.tokens == 7).all()
    assert (batch.labels != -100).sum(axis=1).tolist() == [BLOCK - 1, 2, 0, 0]
    assert (first(split, tokens=TokenFormat(pad=1)).tokens == 7).sum(axis=1).tolist() == [BLOCK, 3, 0, 1]


@pytest.mark.parametrize(
    ("kind", "sample", "options", "match"),
    [
        (pa.list_(pa.int64(), BLOCK), {"tokens": [1] * 7 + [-1]}, {}, "1 of 2 .* negative, or over .*: '1' "),
        (pa.list_(pa.uint64(), BLOCK), {"tokens": [1] * 7 + [1 << 63]}, {}, "negative, or over .*: '1' "),
        (pa.list_(pa.uint16()), {"tokens": [1] * 9}, RAGGED, "more than 8 tokens of uint16.*: '1' "),
        (pa.large_binary(), {"tokens": b"abc"}, BLOBS, "incomplete one: .*'1' "),
        (None, {"length": 9}, {}, "'length' is below 0, or larger than the number of tokens in the block: .*'1' "),
        (None, {"length": -1}, {}, "'length' is below 0, or larger than the number of tokens in the block: .*'1' "),
        (None, {"document_starts": [8]}, {"documents": True}, "'document_starts' .*outside of the block: .*'1' "),
        (None, {"document_starts": [-1]}, {"labels": "within"}, "'document_starts' .*outside of the block: .*'1' "),
    ],
)  # fmt: skip
def test_a_block_that_makes_no_sense_is_named(repository, kind, sample, options, match):
    schema = schema_of(kind, length=pa.int32(), document_starts=pa.list_(pa.int32()))
    good = {"tokens": b"" if kind == pa.large_binary() else [1] * BLOCK, "document_starts": [0]}
    good["length"] = len(good["tokens"])
    split = write_split(repository, [good, {**good, **sample}], schema)
    with make(split, 2, **options) as loader:
        before = loader.state_dict()
        with pytest.raises(BadSampleError, match=match):
            next(loader.numpy())
        assert loader.state_dict() == before


@pytest.mark.parametrize("column", ["tokens", "length", "document_starts"])
def test_null_columns_are_refused(repository, column):
    schema = schema_of(length=pa.int32(), document_starts=pa.list_(pa.int32()))
    sample = {"tokens": [1] * BLOCK, "length": BLOCK, "document_starts": []}
    split = write_split(repository, [sample, {**sample, column: None}], schema)
    with pytest.raises(ConfigError, match=f"column '{column}'.* is null for samples of shard"):
        first(split, batch_size=2, documents=True)


def test_a_version_without_tokens_is_refused_and_its_columns_are_named(repository):
    split = write_split(repository, [{"text": "a"}], TEXT_SCHEMA)
    with pytest.raises(ConfigError, match=r"no column 'tokens' with tokens; the columns are key \(string\), text"):
        make(split)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"tokens": TokenFormat(block_tokens=4)},
            "block_tokens is 4, but the blocks of column 'tokens' have 8 tokens",
        ),
        (
            {"documents": True},
            "no column 'document_starts' with lists of integers, .*; give tokens=TokenFormat\\(end=N\\)",
        ),
        (
            {"labels": "within"},
            "no column 'document_starts' with lists of integers, .*; give tokens=TokenFormat\\(end=N\\)",
        ),
        ({"labels": "all"}, "labels is 'all'; expected 'across', 'within' or None"),
        ({"batch_size": 41, "tail": "drop"}, "gives no full batch of 41"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"tail": "wrap"}, "tail is 'wrap'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(numbered, options, match):
    with pytest.raises(ConfigError, match=match):
        make(numbered, **options)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_tokens": 0}, "block_tokens is 0; expected at least 1"),
        ({"pad": -1}, "pad is -1; expected a token from 0 to"),
        ({"end": 1 << 63}, "end is 9223372036854775808; expected a token from 0 to"),
    ],
)
def test_a_token_format_out_of_range_is_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        TokenFormat(**settings)


def test_shards_of_another_tokenizer_are_refused(repository, monkeypatch):
    # Appends that did not look put them together.
    monkeypatch.setattr("datasvc.shards.versions.combine.TOKENIZER", b"datasvc.nothing")

    def table(tokenizer, key):
        schema = schema_of().with_metadata({**schema_of().metadata, TOKENIZER: tokenizer})
        return write_table(repository.objects, [[{"key": key, "tokens": [1] * BLOCK}]], schema)

    both = append_table(repository.objects, table(b"a" * 64, "0"), table(b"b" * 64, "1"))
    with pytest.raises(ConfigError, match=r"of tokenizer bbbbbbbbbbbb\.\.\., and the data set has tokens of aaaa"):
        first(split_of(repository, both), batch_size=2)


def test_a_state_of_another_order_is_refused(numbered):
    with make(numbered, training=True, seed=1) as loader:
        state = loader.state_dict()
    with make(numbered, training=True, seed=2) as other, pytest.raises(StateMismatchError, match="seed=1"):
        other.load_state_dict(state)


def test_a_mixture_of_blocks_of_other_types_is_one_stream_of_tokens(repository, numbered):
    wide = schema_of(pa.list_(pa.uint32(), BLOCK), length=pa.int32())
    samples = [{"tokens": list(range(n * BLOCK, (n + 1) * BLOCK)), "length": BLOCK - 1} for n in range(100, 140)]
    mixture = Mixture({numbered: 1, write_split(repository, samples, wide): 1}, epoch_samples=80, block=80)
    with make(mixture, 10, training=True) as loader:
        served = [(numbers_of(batch), batch.length.tolist()) for batch in loader.numpy()]
    numbers = [number for batch, _ in served for number in batch]
    assert sorted(numbers) == [*range(40), *range(100, 140)]
    lengths = [length for _, batch in served for length in batch]
    assert lengths == [BLOCK - (number >= 100) for number in numbers]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_batches_of_a_mixture_say_which_split_each_block_is_of(repository, numbered, framework):
    other = write_split(repository, [{"tokens": [1000 + n] * BLOCK} for n in range(40)], schema_of())
    mixture = Mixture({numbered: 1, other: 1}, epoch_samples=40, block=40)
    with make(mixture, 10, training=True) as loader:
        for batch in loader if framework == "torch" else loader.numpy():
            assert type(batch.sources) is type(batch.length)
            assert batch.sources.tolist() == [int(block[0] >= 1000) for block in batch.tokens.tolist()]
    with make(numbered, 10, training=True) as loader:
        assert next(loader.numpy()).sources is None


def test_a_report_counts_blocks(numbered):
    with make(numbered, 10, training=True) as loader:
        assert sum(1 for _ in loader.numpy()) == 4
        report = loader.report()
    assert (report.bottleneck.unit, report.totals.num_samples) == ("blocks", 40)
    assert "4 steps, 40 blocks" in str(report)


def test_a_mixture_of_other_block_sizes_or_tokenizers_is_refused(repository, numbered):
    small = write_split(repository, [{"tokens": [1] * 4}], schema_of(pa.list_(pa.uint16(), 4)))
    with pytest.raises(ConfigError, match=r"blocks differ in size: 8 tokens in .*, 4 tokens in"):
        make(Mixture({numbered: 1, small: 1}))
    splits = [
        write_split(
            repository,
            [{"tokens": [1] * BLOCK}],
            schema_of().with_metadata({**schema_of().metadata, TOKENIZER: each}),
        )
        for each in (b"a" * 64, b"b" * 64)
    ]
    with pytest.raises(ConfigError, match=r"different tokenizers do not mix: aaaaaaaaaaaa\.\.\. in .*, bbbbbbbbbbbb"):
        make(Mixture(dict.fromkeys(splits, 1)))

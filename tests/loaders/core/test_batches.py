"""Which shards a stream of batches holds open, and when: what a small cache rests on."""

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import AccessOrder, OrderConfig, OrderState
from datasvc.repository import Repository
from datasvc.shards.format.partial_reader import open_partial
from datasvc.shards.format.schema import IMAGE, shard_schema
from datasvc.shards.versions.combine import append_table
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import delete_samples
from tests.examples import examples
from tests.shards.written_versions import LABELLED_SCHEMA, write_table
from tests.support.live_shards import live_shards


class Recording:
    """The origin's shards; remembers which are open."""

    def __init__(self, split):
        self._origin = split.origin
        self.open = Counter()

    def open_shard(self, info):
        self.open[info.digest] += 1
        return self._origin.open_shard(info)

    def release_shard(self, info):
        self.open[info.digest] -= 1
        assert self.open[info.digest] >= 0

    def objects(self, table):
        return self._origin.objects(table)

    def open_early(self, _wanted):
        return {}

    def advance(self, epoch, position):
        pass

    def digests(self):
        return set(+self.open)


def batches_of(split, config, batch_size, tail="short"):
    store = Recording(split)
    batches = SampleBatches(
        split, store, config, batch_size=batch_size, rank=0, world_size=1, tail=tail, blob="image", columns=()
    )
    return batches, store


@pytest.mark.parametrize(
    "config",
    [
        OrderConfig(shuffle=None),
        OrderConfig(seed=1, shuffle="windowed", lanes=3, block=50),
        OrderConfig(seed=1, shuffle="windowed", lanes=16, block=20),
    ],
    ids=["table order", "few lanes", "many lanes"],
)
def test_a_shard_is_released_once_nothing_needs_it_and_not_while_something_does(digits, config):
    split = digits["train"]
    batches, store = batches_of(split, config, 1)
    order = AccessOrder(split.table.samples_per_shard, config, 0)
    digests = [info.digest for info in split.table.shards()]
    for batch in itertools.islice(batches.stream(Cursor(0, 0)), len(split)):
        before, position = store.digests(), batch.after.position
        batches.retire(batch)
        assert store.digests() <= {digests[shard] for shard in live_shards(order, position, len(split)).tolist()}
        under_way = {digests[shard] for shard in live_shards(order, position, position).tolist()}
        assert not (before - store.digests()) & under_way
    assert store.digests() == set()


def test_the_first_batch_of_an_epoch_releases_what_a_dropped_tail_left_open(digits):
    split = digits["train"]
    batches, store = batches_of(split, OrderConfig(shuffle=None), 500, tail="drop")
    for batch in itertools.islice(batches.stream(Cursor(0, 0)), 3):
        batches.retire(batch)
    assert batch.epoch == 1
    assert store.digests() <= {split.table.shard(shard).digest for shard in set(batch.shards.tolist())}
    batches.close()
    assert store.digests() == set()


SIZES = [5, 1, 9, 3, 12, 2, 8]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A repository, and the table of a split of forty samples that say their number in every column."""
    repository = Repository.create(str(tmp_path_factory.mktemp("deletions") / "repo"))
    stops = np.cumsum(SIZES).tolist()
    shards = [
        [{"key": str(number), "blob": str(number).encode(), "label": number} for number in range(stop - size, stop)]
        for size, stop in zip(SIZES, stops, strict=True)
    ]
    return repository, write_table(repository.objects, shards, LABELLED_SCHEMA)


def split_of(repository, table):
    return Split("train", "numbers@1", repository, repository.objects.put(table.encode()).digest)


def numbers_of_an_epoch(split, config, *, batch_size, world_size):
    """Return the samples that the ranks serve in epoch 0, padding left out, in no particular order."""
    numbers = []
    for rank in range(world_size):
        batches = SampleBatches(
            split,
            split.origin,
            config,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            tail="short",
            blob="blob",
            columns=("label",),
        )
        for batch in itertools.takewhile(lambda batch: batch.epoch == 0, batches.stream(Cursor(0, 0))):
            found = batch.columns["label"].tolist()
            assert [int(view.tobytes()) for view in batch.blobs] == found
            keys = [split.origin.open_shard(split.table.shard(shard)).sample(row)["key"]
                    for shard, row in zip(batch.shards.tolist(), batch.rows.tolist(), strict=True)]  # fmt: skip
            assert list(map(int, keys)) == found
            for index, number in enumerate(found):
                assert f": '{number}' (row" in batches.describe(batch, index)
            numbers += [number for number, counts in zip(found, batch.mask, strict=True) if counts]
            batches.retire(batch)
        batches.close()
    return numbers


class Early:
    """A store that has no whole shard, but reads the samples that are wanted."""

    def __init__(self, split):
        self._objects = split.repository.objects

    def open_shard(self, info):
        raise AssertionError(f"shard {info.digest} is wanted whole")

    def objects(self, _table):
        return self._objects

    def open_early(self, wanted):
        shards = {each.info.digest: open_partial(self._objects, each.info, each.index) for each in wanted}
        for each in wanted:
            shards[each.info.digest].fetch(self._objects, each.rows)
        return shards

    def release_shard(self, info): ...

    def advance(self, epoch, position): ...


def test_a_sample_that_was_read_early_is_named_without_its_shard(digits):
    split = digits["train"]
    batches = SampleBatches(
        split, Early(split), OrderConfig(), batch_size=20, rank=0, world_size=1, tail="drop", blob=IMAGE, columns=()
    )
    batch = next(batches.stream(Cursor(0, 0)))
    assert len(batch.parts) > 1
    for index, (shard, row) in enumerate(zip(batch.shards.tolist(), batch.rows.tolist(), strict=True)):
        key = split.origin.open_shard(split.table.shard(shard)).sample(row)["key"]
        assert f": {key!r} (row {row} of shard " in batches.describe(batch, index)


@examples(60)
@given(
    deleted=st.sets(st.integers(0, sum(SIZES) - 1), max_size=sum(SIZES) - 4),
    config=st.one_of(
        st.just(OrderConfig(shuffle=None)),
        st.builds(OrderConfig, seed=st.integers(0, 5)),
        st.builds(
            OrderConfig,
            seed=st.integers(0, 5),
            shuffle=st.just("windowed"),
            lanes=st.integers(1, 4),
            block=st.integers(1, 9),
            sticky=st.booleans(),
        ),
    ),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
)
def test_the_ranks_serve_exactly_the_samples_that_are_not_deleted(numbered, deleted, config, batch_size, world_size):
    repository, table = numbered
    stops = np.cumsum(SIZES)
    shards = np.searchsorted(stops, sorted(deleted), side="right")
    rows = np.array(sorted(deleted), np.int64) - (stops - SIZES)[shards]
    less = delete_samples(
        repository.objects, table, {int(shard): rows[shards == shard] for shard in np.unique(shards)}
    )
    served = numbers_of_an_epoch(split_of(repository, less), config, batch_size=batch_size, world_size=world_size)
    assert sorted(served) == sorted(set(range(sum(SIZES))) - deleted)


def test_a_position_saved_on_one_version_is_refused_on_the_one_with_deletions(numbered):
    repository, table = numbered
    config = OrderConfig(seed=3)
    state = OrderState(split_of(repository, table).digest, 0, 7, config)
    state.check_matches(split_of(repository, table).digest, config, len(split_of(repository, table)))
    less = split_of(repository, delete_samples(repository.objects, table, {2: np.array([1])}))
    with pytest.raises(StateMismatchError, match="open the version that the state was saved with"):
        state.check_matches(less.digest, config, len(less))


def batches_with(split, *, blob="blob", columns=()):
    return SampleBatches(
        split, split.origin, OrderConfig(shuffle=None), batch_size=1, rank=0, world_size=1, tail="short", blob=blob,
        columns=columns,
    )  # fmt: skip


def test_a_column_that_later_samples_brought_is_refused_where_a_sample_lacks_it(numbered):
    repository, table = numbered
    objects = repository.objects
    scored = shard_schema([*LABELLED_SCHEMA, pa.field("score", pa.int64())])
    sample = {"key": "x", "blob": b"", "label": 0}
    new = write_table(objects, [[{**sample, "score": 7}], [{**sample, "key": "y", "score": None}]], scored)
    old = delete_samples(objects, table, {shard: np.arange(size) for shard, size in enumerate(SIZES) if shard != 1})
    both = append_table(objects, old, new)
    with pytest.raises(ConfigError, match=r"'score' of numbers@1/train is null for 1 sample.* no such column"):
        next(batches_with(split_of(repository, both), columns=("score",)).stream(Cursor(0, 0)))
    assert next(batches_with(split_of(repository, both)).stream(Cursor(0, 0))).columns == {}
    # Shard 1 has the sample y, whose score is null, and is left when shard 0, which has no score, is gone.
    later = delete_samples(objects, both, {0: np.array([0])})
    stream = batches_with(split_of(repository, later), columns=("score",)).stream(Cursor(0, 0))
    assert next(stream).columns["score"].tolist() == [7]
    with pytest.raises(ConfigError, match=r"is null for 1 sample .*, such as 'y' in shard .* no value"):
        next(stream)
    scores = delete_samples(objects, later, {1: np.array([0])})
    stream = batches_with(split_of(repository, scores), columns=("score",)).stream(Cursor(0, 0))
    assert [next(stream).columns["score"].tolist() for _ in range(2)] == [[7], [7]]


def test_a_column_that_no_sample_has_is_refused_at_once(numbered):
    repository, table = numbered
    for options in ({"blob": "image"}, {"columns": ("width",)}):
        with pytest.raises(ConfigError, match=r"samples\) has no column '(image|width)'; its columns are \['key'"):
            batches_with(split_of(repository, table), **options)

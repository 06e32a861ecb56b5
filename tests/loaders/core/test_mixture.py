"""Mixtures of data sets, each whole and in its own order, over any restart; and the shards that they hold."""

import itertools
import json
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache import Cache
from datasvc.cache.catalogue.next_use import UseTimeline
from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError, ConfigError
from datasvc.keyed_random import KeyedPermutation, derive_keys
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.loaders.core.mixture import Mixture, clock_steps, split_orders
from datasvc.order import AccessOrder, OrderConfig
from datasvc.repository import Repository
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.versions.dataset import Split
from tests.examples import examples
from tests.loaders.numbered import Numbers, make_splits, mix, write_split
from tests.shards.written_versions import LABELLED_SCHEMA
from tests.support.live_shards import live_shards


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return make_splits(tmp_path_factory.mktemp("mixture"))


class Recording:
    """The origin's shards; remembers which are open, and how often one was opened."""

    def __init__(self, split):
        self._split = split
        self.open, self.opened = Counter(), Counter()
        self.at = None

    def open_shard(self, info):
        self.opened[info.digest] += 1
        self.open[info.digest] += 1
        assert self.open[info.digest] == 1
        return self._split.origin.open_shard(info)

    def release_shard(self, info):
        self.open[info.digest] -= 1
        assert self.open[info.digest] == 0

    def objects(self, _table):
        return self._split.repository.objects

    def open_early(self, _wanted):
        return {}

    def advance(self, epoch, position):
        self.at = epoch, position

    def shards(self):
        digests = [info.digest for info in self._split.table.shards()]
        return {digests.index(digest) for digest in +self.open}


def reference(mixture, config, count):
    """Return split and number of the first `count` samples, counted out one by one."""
    line, served, block = [], Counter(), mixture.block
    keys = derive_keys(config.seed, 0, 33, KeyedPermutation.num_keys)
    total = sum(mixture.weights)
    edges = [Fraction(sum(mixture.weights[:number]), total) for number in range(len(mixture.weights) + 1)]
    configs = split_orders(mixture, config)
    while len(line) < count:
        number = len(line) // block
        upto = [[int((number + more) * block * edge) for edge in edges] for more in (0, 1)]
        places = []
        for source in range(len(mixture.weights)):
            before, after = (each[source + 1] - each[source] for each in upto)
            places += [source] * (after - before)
        for place in KeyedPermutation(block, keys).permute(np.arange(block), np.full(block, number)).tolist():
            source = places[place]
            split = mixture.splits[source]
            epoch, position = divmod(served[source], len(split))
            order = AccessOrder(split.table.samples_per_shard, configs[source], epoch)
            (shard,), (row,) = order.locate([position])
            line.append((source, split[int(split.table.samples_per_shard[:shard].sum() + row)]["label"]))
            served[source] += 1
    return line[:count]


def serve(mixture, config, *, runs, world_sizes, batch_sizes, tail="short"):
    """Return samples by epoch and position, of runs of so many steps that are killed and resumed at other sizes."""
    served, state = {}, None
    for steps, world_size, batch_size in zip(runs, world_sizes, batch_sizes, strict=True):
        states = []
        for rank in range(world_size):
            loader = Numbers(mixture, batch_size, rank=rank, world_size=world_size, order=config, tail=tail)
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(steps):
                taken = next(iter(loader), None) or next(iter(loader))
                batch, numbers = taken
                for position, counts, source, number in zip(
                    batch.positions.tolist(), batch.mask.tolist(), batch.sources.tolist(), numbers, strict=True
                ):
                    if counts:
                        assert (batch.epoch, position) not in served
                        served[batch.epoch, position] = (source, number)
            states.append(json.loads(json.dumps(loader.state_dict())))
            loader.close()
        assert all(each == states[0] for each in states)
        state = states[0]
    return served, state


CONFIGS = st.one_of(
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
)


@examples(25)
@given(
    weights=st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9)),
    config=CONFIGS,
    block=st.integers(30, 50),
    epoch_samples=st.integers(8, 60),
    runs=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(1, 4)), min_size=1, max_size=4
    ),
    tail=st.sampled_from(["short", "pad"]),
)
def test_killed_and_resumed_at_any_size_the_mixture_goes_on_as_counted_out_one_by_one(
    splits, weights, config, block, epoch_samples, runs, tail
):
    mixture = mix(splits, weights, block=block, epoch_samples=epoch_samples)
    steps, world_sizes, batch_sizes = zip(*runs, strict=True)
    served, state = serve(
        mixture, config, runs=steps, world_sizes=world_sizes, batch_sizes=batch_sizes, tail=tail
    )  # fmt: skip
    count = state["epoch"] * epoch_samples + state["position"]
    line = reference(mixture, config, count)
    assert served == {divmod(place, epoch_samples): sample for place, sample in enumerate(line)}


def test_a_pass_over_a_data_set_serves_each_of_its_samples_once_in_a_new_order_each_time(splits):
    mixture = mix(splits, (1, 1, 8), epoch_samples=90)
    passes = {}
    with Numbers(mixture, 7) as loader:
        for _ in range(4):
            for batch, numbers in loader:
                for source, number in zip(batch.sources.tolist(), numbers, strict=True):
                    passes.setdefault(source, []).append(number)
    for source, split in enumerate(splits.values()):
        whole = sorted(sample["label"] for sample in split)
        cut = [passes[source][start : start + len(split)] for start in range(0, len(passes[source]), len(split))]
        assert all(sorted(each) == whole for each in cut[:-1])
        assert set(cut[-1]) <= set(whole)
    assert len({tuple(passes[2][start : start + 2]) for start in range(0, 200, 2)}) == 2


def test_splits_of_equal_sizes_are_shuffled_apart_and_a_split_alike_in_every_mixture(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    twins = {name: write_split(repository, name, [20, 20], first) for name, first in (("a", 0), ("b", 100))}

    def first_pass(mixture, number):
        with Numbers(mixture, 10) as loader:
            found = [label for batch, labels in loader for source, label in zip(batch.sources, labels, strict=True)
                     if source == number]  # fmt: skip
        return found[:30]

    both = Mixture([(twins["a"], 1), (twins["b"], 1)])
    assert first_pass(both, 0) != [number - 100 for number in first_pass(both, 1)]
    assert first_pass(Mixture([(twins["b"], 3), (twins["a"], 2)]), 0)[:30] == first_pass(both, 1)


def test_many_passes_of_a_tiny_split_fit_into_one_batch_and_open_its_shards_once(splits):
    mixture = mix(splits, (5, 1, 94), block=100, epoch_samples=1000)
    stores = [Recording(split) for split in mixture.splits]
    batches = SampleBatches(
        mixture, stores, OrderConfig(), batch_size=500, rank=0, world_size=1,
        tail="drop", blob="blob", columns=("label",),
    )  # fmt: skip
    first = next(batches.stream(Cursor(0, 0)))
    tiny = first.columns["label"][first.sources == 2].tolist()
    assert len(tiny) == 470
    assert all(sorted(tiny[start : start + 2]) == [300, 301] for start in range(0, 470, 2))
    assert list(stores[2].opened.values()) == [1]


@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
@pytest.mark.parametrize("batch_size", [1, 4, 33])
def test_shards_are_held_as_long_as_a_splits_own_order_needs_them_and_no_longer(splits, batch_size, tail):
    mixture = mix(splits, (5, 3, 2), epoch_samples=70)
    config = OrderConfig(seed=1, shuffle="windowed", lanes=2, block=4)
    stores = [Recording(split) for split in mixture.splits]
    batches = SampleBatches(
        mixture, stores, config, batch_size=batch_size, rank=0, world_size=1, tail=tail, blob="blob", columns=()
    )
    configs, order = split_orders(mixture, config), mixture.order(config.seed)
    stream = batches.stream(Cursor(0, 0))
    under_way = list(itertools.islice(stream, 2))
    for _ in range(300 // batch_size):
        under_way.append(next(stream))
        batch = under_way.pop(0)
        batches.retire(batch)
        start, stop = under_way[0].before, under_way[-1].after
        for number, store in enumerate(stores):
            split = mixture.splits[number]
            own = order.cursors(start.epoch, start.position)[number]
            end = order.cursors(stop.epoch, stop.position)[number]
            needed = set()
            for epoch in range(own[0], end[0] + 1):
                epoch_order = AccessOrder(split.table.samples_per_shard, configs[number], epoch)
                begin = own[1] if epoch == own[0] else 0
                until = end[1] if epoch == end[0] else len(split)
                needed |= set(live_shards(epoch_order, begin, until).tolist())
            read = {int(shard) for each in under_way for shard in each.shards[each.sources == number]}
            served = {int(shard) for each in under_way for shard in each.shards[(each.sources == number) & each.mask]}
            assert served <= read <= store.shards() <= needed | read
            assert store.at == order.cursors(batch.after.epoch, batch.after.position)[number]
    batches.close()
    assert not any(store.shards() for store in stores)


def test_after_passes_inside_one_batch_only_what_is_begun_stays_open_and_stores_know_where_a_stream_begins(splits):
    mixture = mix(splits, (1, 8, 1))
    config = OrderConfig(seed=1, shuffle="windowed", lanes=1, block=1)
    configs, order = split_orders(mixture, config), mixture.order(config.seed)
    stores = [Recording(split) for split in mixture.splits]
    batches = SampleBatches(
        mixture, stores, config, batch_size=44, rank=0, world_size=1, tail="drop", blob="blob", columns=()
    )
    counts = splits["middle"].table.samples_per_shard
    for epoch in range(10):
        start = Cursor(epoch, 3)
        batch = next(batches.stream(start))
        assert [store.at for store in stores] == order.cursors(epoch, 3)
        batches.retire(batch)
        own_epoch, position = order.cursors(epoch, batch.after.position)[1]
        windows = AccessOrder(counts, configs[1], own_epoch).windows
        begun = set(windows.shards[(windows.first < position) & (windows.stop > position)].tolist())
        assert stores[1].shards() <= begun
        batches.close()


def test_padding_names_samples_of_the_epochs_start(splits):
    mixture = mix(splits, (1, 1, 8), epoch_samples=50)
    with Numbers(mixture, 20, tail="pad") as loader:
        for _ in range(2):
            batches = list(loader)
            last, numbers = batches[-1]
            assert last.mask.tolist() == [True] * 10 + [False] * 10
            assert last.positions.tolist() == [*range(40, 50), *range(10)]
            assert numbers[10:] == batches[0][1][:10]


def test_a_weight_of_0_leaves_a_split_out_and_its_number_stays(splits):
    with Numbers(mix(splits, (1, 0, 1)), 10) as loader:
        found = {int(source) for batch, _ in loader for source in batch.sources}
    assert found == {0, 2}
    assert len(mix(splits, (1, 0, 1))) == 42


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_batches_say_which_split_each_image_is_of_by_its_number_in_the_names(digits, framework):
    mixture = Mixture([(digits["train"], 3), (digits["val"], 1)], epoch_samples=64, block=16)
    assert mixture.names == ("digits@1/train", "digits@1/val")
    keys = [{sample["key"] for sample in split} for split in mixture.splits]
    options = {
        "batch_size": 16,
        "training": True,
        "size": 32,
        "columns": ("key",),
        "decode": DecodeConfig(num_threads=1),
    }
    with ImageLoader(mixture, **options) as loader:
        for batch in loader if framework == "torch" else loader.numpy():
            assert type(batch.sources) is type(batch.labels)
            assert batch.sources.dtype == batch.labels.dtype
            sources = batch.sources.tolist()
            assert sources.count(0) == 12
            assert all(key in keys[source] for key, source in zip(batch.columns["key"], sources, strict=True))
    with ImageLoader(digits["train"], **options) as loader:
        assert next(iter(loader)).sources is None


def test_a_split_of_weight_0_needs_no_columns(splits, tmp_path):
    schema = shard_schema([field for field in LABELLED_SCHEMA if field.name != "label"])
    plain = write_split(Repository.create(str(tmp_path / "repo")), "plain", [3], 0, schema)
    with Numbers(Mixture({plain: 0, splits["tiny"]: 1}), 2) as loader:
        assert sorted(next(iter(loader))[1]) == [300, 301]


def test_a_mixture_may_be_given_as_a_mapping_and_goes_to_other_processes_small(splits):
    mixture = Mixture({splits["big"]: 0.75, splits["tiny"]: 0.25})
    assert mixture.weights == (3, 1)
    assert len(mixture) == 42
    packed = pickle.dumps(mixture)
    assert len(packed) < 1000
    assert pickle.loads(packed).describe() == mixture.describe()
    assert repr(mixture) == "Mixture(3 big@1/train : 1 tiny@1/train, 42 samples)"


@pytest.mark.parametrize(
    "weights", [(7, 2, 1), (0.7, 0.2, 0.1), (70.0, np.float32(20), 10), (Fraction(7, 10), Fraction(1, 5), 0.1)]
)
def test_ratios_count_and_decimals_mean_what_is_written(splits, weights):
    assert mix(splits, weights).weights == (7, 2, 1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, -1, 1), "weight of middle@1/train is -1; expected a finite number, at least 0"),
        ((1, float("nan"), 1), "weight of middle@1/train is nan"),
        ((1, 1, float("inf")), "weight of tiny@1/train is inf"),
        ((1, "much", 1), "weight of middle@1/train is 'much'"),
        ((0, 0, 0.0), "needs at least one split with a weight above 0"),
        (
            (1, 1, 0.19),
            "weight of tiny@1/train gives less than one sample in a block of 10; give a block of at least 12",
        ),
    ],
)
def test_weights_that_mean_nothing_are_refused_by_name(splits, weights, message):
    with pytest.raises(ConfigError, match=message):
        mix(splits, weights)


def test_mixtures_of_nothing_or_of_a_split_twice_are_refused(splits, tmp_path):
    with pytest.raises(ConfigError, match="needs at least one split"):
        Mixture([])
    big = splits["big"]
    again = Split("val", "copy@2", big.repository, big.digest)
    with pytest.raises(ConfigError, match="copy@2/val has the same samples as big@1/train"):
        Mixture([(big, 1), (again, 2)])
    repository = Repository.create(str(tmp_path / "repo"))
    with pytest.raises(ConfigError, match="none@1/train has a weight and no samples"):
        Mixture([(big, 1), (write_split(repository, "none", [], 0), 1)])
    for options, message in (({"epoch_samples": 0}, "epoch_samples is 0"), ({"block": 0}, "block is 0")):
        with pytest.raises(ConfigError, match=message):
            mix(splits, **options)


def test_a_column_that_one_split_lacks_or_has_of_another_type_is_refused_by_its_name(splits, tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    plain = [field for field in LABELLED_SCHEMA if field.name != "label"]
    cases = [
        ([], r"Split\(other@1/train, 3 samples\) has no column 'label'"),
        ([pa.field("label", pa.int64())], "'label' is int64 in other@1/train and int32 in big@1/train"),
    ]
    for extra, message in cases:
        other = write_split(repository, "other", [3], 0, shard_schema([*plain, *extra]))
        with pytest.raises(ConfigError, match=message):
            Numbers(Mixture([(splits["big"], 1), (other, 1)]), 2)


@pytest.mark.slow
def test_a_mixture_streams_through_a_cache_that_holds_no_more_than_the_windows_of_its_splits(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    many = {name: write_split(repository, name, [5] * 40, first) for name, first in (("a", 0), ("b", 1000))}
    mixture = Mixture({many["a"]: 3, many["b"]: 1}, epoch_samples=320, block=8)
    options = {"order": OrderConfig(seed=2, shuffle="windowed", lanes=1, block=10), "prefetch": 1}
    with Cache(tmp_path / "small", budget=1) as cache, pytest.raises(CacheFullError) as refused:
        Numbers(mixture, 8, cache=cache, **options)
    budget = int(str(refused.value).split("needs ")[1].split()[0])
    assert budget < sum(int(footprint(split.table.bytes_per_shard).sum()) for split in mixture.splits) / 2
    served = []
    with Cache(tmp_path / "cache", budget=budget) as cache:
        with Numbers(mixture, 8, cache=cache, **options) as loader:
            for _ in range(3):
                for _, numbers in loader:
                    served += numbers
                    assert cache.status().resident_bytes <= budget
            assert cache.status().held_bytes > 0
        assert cache.status().held_bytes == 0
    own = [number for number in served if number < 200]
    other = [number for number in served if number >= 1000]
    assert (len(own), len(other)) == (720, 240)
    assert sorted(own[:600]) == sorted([*range(200)] * 3)
    assert sorted(other[:200]) == [*range(1000, 1200)]


def test_the_windows_of_all_splits_must_fit_the_cache_together(digits, tmp_path):
    mixture = Mixture({digits["train"]: 3, digits["val"]: 1})
    needed = sum(int(footprint(split.table.bytes_per_shard).sum()) for split in mixture.splits)
    options = {"blob": "image", "columns": ("label",)}
    with (
        Cache(tmp_path / "cache", budget=needed - 1) as cache,
        pytest.raises(CacheFullError, match=f"needs {needed} "),
    ):
        Numbers(mixture, 4, cache=cache, **options)
    without = Mixture({digits["train"]: 3, digits["val"]: 0})
    with Cache(tmp_path / "cache", budget=needed - 1) as cache:
        Numbers(without, 4, cache=cache, **options).close()


@given(weights=st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9)), number=st.integers(1, 10**6))
def test_the_clocks_by_which_a_cache_compares_the_splits_go_side_by_side(splits, weights, number):
    mixture = mix(splits, weights, block=30)
    own = mixture.order(0).cursors(*divmod(30 * number, len(mixture)))
    sizes = [split.table.size_bytes / len(split) for split in mixture.splits]
    mean = sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    steps = clock_steps(mixture)
    for split, weight, step, cursor in zip(mixture.splits, weights, steps, own, strict=True):
        if weight:
            clock = UseTimeline(split.table, OrderConfig(), step_bytes=step).clock(*cursor)
            # Off by the sample that it may be off its share, and half a byte of rounding for each.
            assert abs(clock - 30 * number * mean) <= step * (1 + 0.5 * 30 * number * weight / sum(weights) / step)
        else:
            assert step is None


def test_labels_become_those_of_the_mixture_by_their_names(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    first = write_split(repository, "first", [2], 0, classes=("cat", "dog"))
    second = write_split(repository, "second", [3], 0, classes=("bird", "dog", "cat"))
    nameless = write_split(repository, "nameless", [4], 0)
    mixture = Mixture({first: 1, second: 1})
    assert mixture.classes == ("cat", "dog", "bird")
    batches = SampleBatches(
        mixture, [first.origin, second.origin], OrderConfig(), batch_size=30, rank=0, world_size=1, tail="pad",
        blob="blob", columns=("label",),
    )  # fmt: skip
    batch = next(batches.stream(Cursor(0, 0)))
    assert batch.columns["label"].dtype == np.int32
    for view, source, label in zip(batch.blobs, batch.sources.tolist(), batch.columns["label"].tolist(), strict=True):
        assert mixture.classes[label] == mixture.splits[source].classes[int(view.tobytes())]
    with pytest.raises(ConfigError, match="labels of nameless@1/train have no class names"):
        Numbers(Mixture({first: 1, nameless: 1}), 2)
    Numbers(Mixture({first: 1, nameless: 1}), 2, columns=()).close()


def test_a_split_without_images_or_another_column_is_named(digits, splits):
    mixture = Mixture({digits["val"]: 1, splits["big"]: 1})
    options = {"batch_size": 2, "training": False, "size": 32, "decode": DecodeConfig(num_threads=1)}
    with pytest.raises(ConfigError, match=r"Split\(big@1/train, 40 samples\) has no images; its columns are \['key'"):
        ImageLoader(mixture, **options)
    with pytest.raises(ConfigError, match=r"Split\(digits@1/val, 360 samples\) has no column 'blob'; its columns"):
        ImageLoader(Mixture({digits["val"]: 1, digits["train"]: 1}), columns=("blob",), **options)


def test_images_of_a_mixture_resume_bit_for_bit(digits):
    mixture = Mixture({digits["train"]: 2, digits["val"]: 1}, epoch_samples=100, block=30)
    options = {"batch_size": 32, "training": True, "size": 32, "seed": 5, "decode": DecodeConfig(num_threads=1)}
    with ImageLoader(mixture, **options) as loader:
        whole = [batch for _ in range(3) for batch in loader]
    with ImageLoader(mixture, **options) as loader:
        for _ in range(2):
            next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    with ImageLoader(mixture, **options) as loader:
        loader.load_state_dict(state)
        rest = [batch for _ in range(3) for batch in loader]
    for first, second in zip(whole[2:], rest[:7], strict=True):
        assert first.images.equal(second.images)
        assert first.labels.equal(second.labels)
        assert (first.epoch, first.positions.tolist()) == (second.epoch, second.positions.tolist())


def test_labels_that_name_no_class_stay_and_those_behind_the_names_are_refused(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    names = {"cats": ("tabby", "manx"), "dogs": ("pug", "tabby")}
    cats = write_split(repository, "cats", [3], -1, classes=names["cats"])  # labels -1, 0 and 1
    dogs = write_split(repository, "dogs", [2], 0, classes=names["dogs"])
    mixture = Mixture({cats: 1, dogs: 1}, block=2, epoch_samples=6)
    # fmt: off
    batches = SampleBatches(
        mixture, [each.origin for each in mixture.splits], OrderConfig(), batch_size=6, rank=0, world_size=1,
        tail="drop", blob="blob", columns=("label",),
    )
    # fmt: on
    batch = next(batches.stream(Cursor(0, 0)))
    found = dict(
        zip(
            [(int(s), view.tobytes()) for s, view in zip(batch.sources, batch.blobs, strict=True)],
            batch.columns["label"].tolist(),
            strict=True,
        )
    )
    assert found == {(0, b"-1"): -1, (0, b"0"): 0, (0, b"1"): 1, (1, b"0"): 2, (1, b"1"): 0}
    batches.close()
    wrong = write_split(repository, "wrong", [1], 7, classes=names["cats"])
    # fmt: off
    batches = SampleBatches(
        Mixture({wrong: 1, dogs: 1}, block=2), [wrong.origin, dogs.origin], OrderConfig(), batch_size=2, rank=0,
        world_size=1, tail="drop", blob="blob", columns=("label",),
    )
    # fmt: on
    with pytest.raises(ConfigError, match=r"has the label 7 .* only 2 class names"):
        next(batches.stream(Cursor(0, 0)))

"""Views grouped by aspect: every order serves the samples that it has without groups, similar shapes together."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

import datasvc
from datasvc.api.purge import purge
from datasvc.cache import Cache
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.ledger.audit import audit_folders
from datasvc.ledger.audit_text import SampleNames
from datasvc.loaders.core.derived_order import window_need
from datasvc.loaders.core.mixture import Mixture, check_samples
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.torch.sampler import OrderBatchSampler
from datasvc.models import ConsumptionTracker, find_consumers
from datasvc.order import OrderConfig
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.packing import groups
from datasvc.shards.packing.groups import encode_aspects
from datasvc.shards.versions.delete import delete
from datasvc.shards.views import group
from tests.loaders.numbered import Numbers
from tests.models.trainings import commit
from tests.shards.views.test_kept_views import sweep
from tests.shards.views.test_weigh import ORDERS
from tests.shards.written_versions import write_version

SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
    ]
)
GROUP, NUM = 2, 21 * 13
SPAN = 32 * GROUP


def shape(number):
    drawn = np.random.default_rng(number)
    return int(drawn.integers(50, 200)), int(drawn.integers(50, 200))


def aspect(number):
    return int(encode_aspects(*(np.array([side]) for side in shape(number)))[0])


def sample(number):
    width, height = shape(number)
    return {"key": str(number), "image": b"0" * 500, "label": number, "width": width, "height": height}


@pytest.fixture
def split(repository):
    shards = [[sample(number) for number in range(first, first + 13)] for first in range(0, NUM, 13)]
    write_version(repository, "coco", {"train": shards}, SCHEMA)
    delete(repository, "coco", where="label in (3, 40)")
    return open_dataset(repository, "coco")["train"]


def load(view, batch_size, **options):
    return Numbers(view, batch_size, **{"blob": None, "prefetch": 0, **options})


def served(view, order, epoch, **options):
    loader = load(view, GROUP, order=order, **options)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
    return [number for _, numbers in loader for number in numbers]


@pytest.mark.parametrize("order", ORDERS, ids=lambda each: f"{each.shuffle} {each.sticky}")
@pytest.mark.parametrize("is_weighted", [False, True])
def test_each_epoch_serves_what_it_serves_without_groups_and_neighbours_of_an_aspect_together(
    split, order, is_weighted
):
    split = split.weighted("label") if is_weighted else split
    view = split.grouped_by_aspect(GROUP)
    assert len(view) == len(split)
    orders = []
    for epoch in range(3):
        plain, grouped = served(split, order, epoch), served(view, order, epoch)
        assert plain != grouped
        num_blocks = len(plain) // SPAN
        for block in range(num_blocks):
            part = slice(block * SPAN, None if block == num_blocks - 1 else (block + 1) * SPAN)
            assert Counter(plain[part]) == Counter(grouped[part])
            aspects = [aspect(number) for number in grouped[part]]
            rest = len(aspects) % GROUP
            ranges = sorted(aspects[first : first + GROUP] for first in range(0, len(aspects) - rest, GROUP))
            neighbours = sorted(aspects[: len(aspects) - rest])
            assert [each for pair in ranges for each in pair] == neighbours
            assert [sum(pair) for pair in ranges] != [sum(aspects[2 * n : 2 * n + 2]) for n in range(len(ranges))]
        orders.append(grouped)
        assert served(view, order, epoch) == grouped
    # Also the samples that fill no group, which may be dropped. An evaluation has the same order each time.
    for part in (slice(GROUP), slice(-1, None)):
        is_constant = order.shuffle is None and not is_weighted
        assert (len({tuple(each[part]) for each in orders}) == 1) == is_constant


@pytest.mark.parametrize("order", ORDERS, ids=lambda each: f"{each.shuffle} {each.sticky}")
def test_positions_are_located_one_by_one_as_all_at_once_and_found_again(split, monkeypatch, order):
    view = split.grouped_by_aspect(GROUP)
    whole = np.stack(view.access_order(order, 1).locate(np.arange(271)))
    monkeypatch.setattr(groups, "_POSITIONS_AT_ONCE", 1)
    access = view.access_order(order, 1)
    positions = np.random.default_rng(0).permutation(271)
    assert np.array_equal(np.stack(access.locate(positions)), whole[:, positions])
    for position in positions[:50].tolist():
        assert np.array_equal(np.concatenate(access.locate([position])), whole[:, position])
        assert access.positions_of(*whole[:, [position]]) == position
    assert np.array_equal(access.positions_of(*whole), np.arange(271))
    for wrong in (-1, 271):
        with pytest.raises(IndexError, match="is outside 0"):
            access.locate([wrong])


def test_positions_do_not_depend_on_what_another_thread_locates_meanwhile(split, monkeypatch):
    view, positions = split.grouped_by_aspect(GROUP), [70, 3, 200]
    expected, access = (view.access_order(ORDERS[0], 1) for _ in range(2))
    access.locate([0])
    of_other = access._computed
    monkeypatch.setattr(
        groups.GroupedOrder, "_computed", property(lambda _: of_other, lambda *_: None), raising=False
    )
    found = np.stack(access.locate(positions))
    monkeypatch.undo()
    assert np.array_equal(found, np.stack(expected.locate(positions)))


def test_samples_that_fill_no_group_have_any_aspect(split):
    view = split.grouped_by_aspect(10)
    last = [served(view, ORDERS[0], epoch)[-1] for epoch in range(12)]
    above = [sum(aspect(number) > aspect(each) for number in range(NUM)) / NUM for each in last]
    assert min(above) < 0.3
    assert max(above) > 0.7


def test_an_aspect_is_a_number_from_tall_to_wide_with_squares_in_the_middle():
    sizes = [(1, 9999), (300, 400), (30, 31), (7, 7), (0, 0), (31, 30), (400, 300), (9999, 1)]
    codes = encode_aspects(*np.array(sizes).T)
    assert codes.tolist() == [0, 117, 126, 128, 128, 129, 138, 255]
    widths, heights = np.random.default_rng(0).integers(1, 5000, (2, 2000))
    ascending = np.argsort([Fraction(int(w), int(h)) for w, h in zip(widths, heights, strict=True)])
    assert (np.diff(encode_aspects(widths, heights)[ascending]) >= 0).all()


def test_runs_of_4_3_and_5_ranks_with_kills_serve_what_one_rank_serves(split):
    view = split.grouped_by_aspect(12)
    for order in ORDERS:
        whole = served(view, order, 0) + served(view, order, 1)
        found, state = [], None
        for world_size, batch_size, num_steps in [(4, 3, 2), (3, 4, 13), (2, 6, 400)]:
            loaders = [
                load(view, batch_size, rank=rank, world_size=world_size, order=order, prefetch=2)
                for rank in range(world_size)
            ]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            for _ in range(num_steps):
                steps = [next(iter(loader), None) for loader in loaders]
                if steps[0] is None:
                    continue
                pairs = [
                    pair for batch, numbers in steps for pair in zip(batch.positions.tolist(), numbers, strict=True)
                ]
                found += [number for _, number in sorted(pairs)]
                if len(found) >= 2 * len(view):
                    break
            state = loaders[0].state_dict()
            next(iter(loaders[0]), None)  # served after the state: a kill discards it
        assert found[: 2 * len(view)] == whole


def test_a_sampler_of_torch_an_audit_and_trained_on_name_the_samples(split, repository, tmp_path):
    view, order = split.weighted("label").grouped_by_aspect(4), ORDERS[2]
    loader = load(view, 4, order=order, ledger=tmp_path / "ledger")
    tracker = ConsumptionTracker(loader)
    truth = Counter()
    for _epoch in range(2):
        for batch, numbers in loader:
            truth.update(zip(map(str, numbers), [batch.epoch] * 4, batch.positions.tolist(), strict=False))
    loader.close()
    commit(repository, "detector", 1, [tracker.use()])
    found = find_consumers(repository, ["detector"], keys=[each["key"] for each in split])
    assert Counter((use.key, use.epoch, use.position) for use in found.all_uses()) == truth
    assert found.gaps == {}
    header = audit_folders([tmp_path / "ledger"]).header
    keys = [key for key, epoch, _ in sorted(truth, key=lambda use: use[1:]) if epoch == 1]
    assert SampleNames(repository, header).keys(1, range(len(view))) == keys
    sampler = OrderBatchSampler(view, order=order, batch_size=4, tail="short")
    assert [str(view[int(index)]["label"]) for batch in sampler for index in batch] == [
        key for key, epoch, _ in sorted(truth, key=lambda use: use[1:]) if epoch == 0
    ]


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("order", [ORDERS[1], OrderConfig(seed=1, shuffle="windowed", block=7)])
def test_an_order_reads_through_a_cache_that_has_the_space_of_its_window(split, tmp_path, order, tail):
    view, batches = split.grouped_by_aspect(1), BatchesAtOnce(GROUP, prefetch=1, tail=tail)
    need = window_need(view)(order, batches)
    assert (
        window_need(split)(order, batches) < need < view.table.num_shards * footprint(view.table.bytes_per_shard[0])
    )
    with Cache(tmp_path / "cache", budget=need) as cache:
        loader = load(view, GROUP, order=order, cache=cache, tail=tail, prefetch=1)
        for epoch in range(2):
            numbers = [number for _, each in loader for number in each]
            assert numbers[:270] == served(view, order, epoch)[:270]
            timeline = loader._cached_stores[0]._timeline
            for shard in range(view.table.num_shards):
                uses = [use for use in timeline.needed_shards(epoch, 0) if use.shard == shard]
                for position in np.flatnonzero(np.array(numbers[:271]) // 13 == shard).tolist():
                    assert any(use.first <= timeline.clock(epoch, position) < use.stop for use in uses)
        loader.close()


def test_groups_are_computed_once_and_again_after_a_loss_and_copied_with_their_version(split, monkeypatch, tmp_path):
    view, repository = split.grouped_by_aspect(4), split.repository
    assert view.view == "grouped_by_aspect(4)"
    assert split.grouped_by_aspect(5).digest != view.digest
    monkeypatch.setattr(group, "_build", None)
    assert split.grouped_by_aspect(4).digest == view.digest
    copy = datasvc.open(str(tmp_path / "copy"), create=True)
    copy.datasets.pull(repository, ["coco@2"])
    assert sweep(copy.repository).objects == ()
    assert served(copy.dataset("coco")["train"].grouped_by_aspect(4), ORDERS[0], 0) == served(view, ORDERS[0], 0)
    (aspects,) = view.table.grouping.objects
    copy.repository.objects.local_path(aspects.digest).unlink()
    problems = copy.datasets.verify("coco").problems  # of the views of both sizes: they have the same aspects
    assert [(each.role, each.digest) for each in problems] == [("aspects", aspects.digest)] * 2
    monkeypatch.undo()
    repository.objects.local_path(view.digest).unlink()
    assert datasvc.open(repository.url).dataset("coco@2")["train"].grouped_by_aspect(4).digest == view.digest


def test_purged_samples_keep_their_places_masked_and_have_no_shape_in_later_views(split, repository):
    view = split.grouped_by_aspect(4)
    before = np.stack(view.access_order(ORDERS[0], 1).locate(np.arange(271)))
    purge(repository, "coco", keys=["7", "200"], dry_run=False)
    again = open_dataset(datasvc.open(repository.url).repository, "coco")["train"]
    kept = again.grouped_by_aspect(4)
    assert kept.digest == view.digest
    assert np.array_equal(np.stack(kept.access_order(ORDERS[0], 1).locate(np.arange(271))), before)
    loader = load(kept, 4, columns=())
    assert (
        sum(
            int((~batch.mask).sum())
            for batch in (loader._batches.read_part(Cursor(0, at), 0) for at in range(0, 271, 4))
        )
        == 2
    )
    later = again.grouped_by_aspect(6)
    codes = groups.Aspects(repository.objects, later.table, later.table.grouping).of(np.zeros(12, int), np.arange(12))
    assert codes.tolist() == [aspect(number) if number != 7 else 128 for number in range(13) if number != 3]


@pytest.mark.parametrize("size", [0, 1 << 63, 2.0, None])
def test_a_table_with_a_group_of_no_size_is_corrupt(split, size):
    table = split.grouped_by_aspect(4).table
    with pytest.raises(CorruptDataError, match="is not a shard table"):
        ShardTable.decode(replace(table, grouping=replace(table.grouping, group=size)).encode(), "a table")


def test_damaged_aspects_are_reported(split):
    view = split.grouped_by_aspect(4)
    assert served(view, ORDERS[0], 0)
    other = split.where("label > 100").grouped_by_aspect(4)
    table = replace(view.table, grouping=replace(view.table.grouping, objects=other.table.grouping.objects))
    aspects = groups.Aspects(split.repository.objects, table, table.grouping)
    with pytest.raises(CorruptDataError, match="does not have the aspects of its table"):
        aspects.of(np.array([0]), np.array([0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda split: split.grouped_by_aspect(0), "group is 0; expected an integer from 1"),
        (lambda split: split.grouped_by_aspect(2.0), "group is 2.0"),
        (lambda split: split.grouped_by_aspect(2).grouped_by_aspect(2), "is grouped already"),
        (lambda split: split.grouped_by_aspect(2).take(0.5), "choose or weigh the samples first, and then group"),
        (lambda split: split.grouped_by_aspect(2).weighted("label"), "choose or weigh the samples first"),
        (lambda split: check_samples(Mixture([(split.grouped_by_aspect(2), 1)])), "give its splits without groups"),
    ],
)
def test_what_cannot_be_grouped_is_refused(split, make, message):
    with pytest.raises(ConfigError, match=message):
        make(split)


def test_samples_without_measured_sizes_are_refused(repository):
    schema = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("width", pa.int32())])
    write_version(repository, "numbers", {"train": [[{"key": "1", "width": 3}]]}, schema)
    with pytest.raises(ConfigError, match="ingest the images as this column"):
        open_dataset(repository, "numbers")["train"].grouped_by_aspect(4)

"""A job's shards, fetched ahead in a process beside it, and single samples of shards that are not here yet."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.next_use import UseTimeline
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.job import CacheJob
from datasvc.cache.prefetch.prefetching_store import PartialShardReader, PrefetchingShardStore
from datasvc.cache.prefetch.stager import JobPrefetcher, StagerJob
from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import AccessOrder, OrderConfig
from datasvc.repository import Objects, Repository
from datasvc.shards import ShardRequest, ingest, open_dataset
from tests.samples import write_folder
from tests.shards.versions.shard_store_laws import ShardStoreLaws

ROOT = Path(__file__).parents[3]
CONFIG = OrderConfig(seed=5, shuffle="windowed", lanes=2, block=8)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Some thirty shards."""
    from datasvc.repository import Repository

    folder = write_folder(tmp_path_factory.mktemp("source") / "pets", {"train": {"a": 60, "b": 60, "c": 60}})
    repository = Repository.create(str(tmp_path_factory.mktemp("repository") / "repo"))
    ingest(repository, str(folder), "pets", shard_bytes=4096)
    found = open_dataset(repository, "pets@1")["train"]
    assert found.table.num_shards > 20
    return found


class TestPrefetchingShardStore(ShardStoreLaws):
    @pytest.fixture
    def store(self, split, tmp_path, monkeypatch):
        # Without the process that fetches ahead: what it has fetched is read like any resident shard.
        monkeypatch.setattr("datasvc.cache.prefetch.prefetching_store.Stager", lambda _job: MagicMock())
        with Cache(tmp_path / "cache", budget="1MB") as cache:
            store = PrefetchingShardStore(cache, split, CONFIG)
            yield store
            store.close()


def used_bytes(split):
    return int(footprint(split.table.bytes_per_shard).sum())


def job(cache, split, epoch=0, position=0):
    return StagerJob(cache.new_job(), split, CONFIG, None, epoch, position)


def resident(cache, split):
    there = set()
    for number, info in enumerate(split.table.shards()):
        with cache.resident(info.digest) as path:
            there |= {number} if path is not None else set()
    return there


def fetch_all(ahead):
    while (piece := ahead.next_shard()) is not None:
        ahead.fetch(piece)


def use_until(job, split, timeline, start, stop):
    """Use what an order needs and lets go of between two places near each other, as a loader does."""
    for piece in timeline.needed_shards(*start):
        if piece.stop <= timeline.clock(*stop) and stop[0] - start[0] <= 1:
            info = split.table.shard(piece.shard)
            job.acquire(info, split.repository)
            job.release(info.digest, timeline.reuse(piece.shard, *stop))


def needed_first(split, epoch, position, count):
    first = []
    for piece in UseTimeline(split.table, CONFIG).needed_shards(epoch, position):
        first += [piece.shard] if piece.shard not in first else []
    return set(first[:count])


def test_what_is_needed_first_is_fetched_first_and_pushed_out_by_nothing_that_is_needed_later(tmp_path, split):
    room = 8 * int(footprint(split.table.bytes_per_shard).max())
    with Cache(tmp_path / "cache", budget=room) as cache:
        ahead = JobPrefetcher(job(cache, split))
        ahead.start()
        fetch_all(ahead)
        there = resident(cache, split)
        assert there == needed_first(split, 0, 0, len(there))  # of an empty cache all is used
        assert len(there) >= 8
        assert ahead.next_shard() is None  # until the job goes on


def test_the_stager_follows_the_job_across_the_end_of_the_epoch(tmp_path, split):
    room = 8 * int(footprint(split.table.bytes_per_shard).max())
    with Cache(tmp_path / "cache", budget=room) as cache:
        running = job(cache, split)
        ahead = JobPrefetcher(running)
        ahead.start()
        timeline, before = UseTimeline(split.table, CONFIG), (0, 0)
        for epoch, position in [(0, 0), (0, 50), (0, 110), (1, 0), (1, 60), (3, 10), (0, 20)]:
            use_until(running.cache, split, timeline, before, (epoch, position))
            before = epoch, position
            ahead.advance(epoch, position)
            fetch_all(ahead)
            needed = needed_first(split, epoch, position, 2)
            assert needed <= resident(cache, split)


def test_what_is_there_already_stays_for_its_next_use(tmp_path, split):
    room = 8 * int(footprint(split.table.bytes_per_shard).max())
    with Cache(tmp_path / "cache", budget=room) as cache:
        soon = min(needed_first(split, 0, 0, 2))
        info = split.table.shard(soon)
        cache.acquire(info, split.repository)
        cache.release(info.digest)  # as `datasvc stage` leaves it: nobody knows when it is needed
        ahead = JobPrefetcher(job(cache, split))
        ahead.start()
        fetch_all(ahead)
        assert soon in resident(cache, split)
        assert cache.counters()["misses"] == len(resident(cache, split))


def test_a_job_served_through_a_small_cache_gets_every_sample_and_never_more_than_the_budget(tmp_path, split):
    budget = used_bytes(split) // 2
    with Cache(tmp_path / "cache", budget=budget) as cache:
        shards = PrefetchingShardStore(cache, split, CONFIG)
        batches = SampleBatches(
            split, shards, CONFIG, batch_size=6, rank=0, world_size=1, tail="short", blob="image", columns=()
        )
        stream, served = batches.stream(Cursor(0, 0)), {0: 0, 1: 0, 2: 0}
        for _ in range(3 * -(-len(split) // 6)):
            batch = next(stream)
            order = AccessOrder(split.table.samples_per_shard, CONFIG, batch.epoch)
            for blob, shard, row in zip(batch.blobs, *order.locate(batch.positions), strict=True):
                origin = split.origin.open_shard(split.table.shard(int(shard)))
                assert bytes(blob) == bytes(origin.blobs("image", np.array([row]))[0])
            served[batch.epoch] += len(batch.blobs)
            batches.retire(batch)
            status = cache.status()
            assert status.resident_bytes + status.reserved_bytes <= budget
        batches.close()
        shards.close()
        assert set(served.values()) == {len(split)}
        # Half of the data fits, so half of each later epoch needs no origin; some shards are cut by lanes.
        assert cache.counters()["misses"] < 3 * split.table.num_shards * 0.85


def test_data_that_fits_is_fetched_once_by_job_or_stager(tmp_path, split):
    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        shards = PrefetchingShardStore(cache, split, CONFIG)
        for epoch in (0, 1):
            for number, info in enumerate(split.table.shards()):
                shards.advance(epoch, number)
                shards.open_shard(info)
                shards.release_shard(info)
        shards.close()
        assert cache.counters()["misses"] == split.table.num_shards


def test_what_a_batch_lacks_is_fetched_side_by_side_where_the_stager_is_late(tmp_path, split, monkeypatch):
    barrier, real = threading.Barrier(3), Objects.read_range  # broken unless three are on their way at once

    def read_range(*arguments):
        barrier.wait(20)
        return real(*arguments)

    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        shards = PrefetchingShardStore(cache, split, CONFIG)
        shards.open_shard(split.table.shard(0))
        shards._stager._program.process.kill()
        shards._stager._program.process.wait()
        there = resident(cache, split)
        missing = [info for number, info in enumerate(split.table.shards()) if number not in there][:3]
        monkeypatch.setattr(Objects, "read_range", read_range)
        assert shards.open_early([ShardRequest(info, None, np.array([0])) for info in missing]) == {}
        for info in missing:
            shards.open_shard(info)
        shards.close()
        assert cache.counters()["misses"] == len(there) + 3


def test_data_that_is_all_here_needs_no_stager(tmp_path, split):
    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        cache.stage([split])
        shards = PrefetchingShardStore(cache, split, CONFIG)
        for info in split.table.shards():
            shards.open_shard(info)
            shards.release_shard(info)
        assert shards._stager is None


ORPHANED = """
import os, sys, time
from datasvc.cache import Cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset

def main():
    split = open_dataset(Repository.open(sys.argv[1]), "pets@1")["train"]
    cache = Cache(sys.argv[2], budget="1GB")
    shards = PrefetchingShardStore(cache, split, OrderConfig(seed=5, shuffle="windowed", lanes=2, block=8))
    shards.open_shard(split.table.shard(0))
    print(shards._stager._program.process.pid, flush=True)
    sys.stdin.read()

main()
"""


FORKING = ORPHANED.replace(
    "    print(", "    if os.fork() == 0:\n        sys.stdin.read()\n        os._exit(0)\n    print("
)


@pytest.mark.parametrize(
    "program",
    [pytest.param(ORPHANED, id="alone"), pytest.param(FORKING, id="a forked child lives on", marks=pytest.mark.slow)],
)
def test_a_stager_ends_with_its_job_however_that_ends(tmp_path, split, program):
    words = [sys.executable, "-c", program, split.repository.url, str(tmp_path / "cache")]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stager = os.pidfd_open(int(process.stdout.readline()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait([stager], 20)
    os.close(stager)
    process.stdin.close()  # ends a forked child
    process.stdout.close()


def test_a_shard_that_cannot_be_fetched_holds_up_no_other_and_is_not_asked_for_again_and_again(tmp_path, split):
    counted = Counter()
    bad = UseTimeline(split.table, CONFIG).needed_shards(0, 0)[6].shard

    class Failing(CacheJob):
        def prefetch(self, info, *words, **options):
            counted[info.digest] += 1
            if info == split.table.shard(bad):
                raise CorruptDataError("bad")
            return super().prefetch(info, *words, **options)

    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        failing = Failing(cache.folder, cache.tenant, None, cache.new_job().id)
        ahead = JobPrefetcher(replace(job(cache, split), cache=failing))
        ahead.start()
        for position in range(10):
            ahead.advance(0, position)
            fetch_all(ahead)
        assert resident(cache, split) == set(range(split.table.num_shards)) - {bad}
        assert counted[split.table.shard(bad).digest] <= 3  # a shard may come in pieces
        assert cache.counters()["prefetch_failures"] == counted[split.table.shard(bad).digest]


def test_shards_are_used_again_after_a_close(tmp_path, split):
    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        shards = PrefetchingShardStore(cache, split, CONFIG)
        for info in split.table.shards()[:4]:
            wanted = ShardRequest(info, None, np.array([0]))
            shards.open_early([wanted])
            shards.open_shard(info)
            shards.close()
        assert {0, 1, 2, 3} <= resident(cache, split)


def test_two_ranks_of_one_order_agree_on_when_a_shard_is_needed_again(tmp_path, split):
    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        ranks = [JobPrefetcher(replace(job(cache, split), lanes=[lane])) for lane in (0, 1)]
        for ahead in ranks:
            ahead.start()
            fetch_all(ahead)
        wanted = UseTimeline(split.table, CONFIG).next_uses(0, 0)
        for number, info in enumerate(split.table.shards()):
            assert (
                cache._open().catalogue.read(lambda tables, digest=info.digest: tables.get(digest)).next_use
                == (wanted[number])
            )


def test_a_job_whose_stager_was_killed_reads_all_samples(tmp_path, split):
    with Cache(tmp_path / "cache", budget=used_bytes(split)) as cache:
        shards = PrefetchingShardStore(cache, split, CONFIG)
        infos = split.table.shards()
        shards.open_shard(infos[0])
        shards._stager._program.process.kill()
        shards._stager._program.process.wait()
        for number, info in enumerate(infos[1:]):
            shards.advance(0, number)
            shards.open_shard(info)
        shards.close()
        assert resident(cache, split) == set(range(len(infos)))


class Counting:
    """Objects of a repository that count what is read by range, and may fail or flip a byte."""

    def __init__(self, objects):
        self._objects = objects
        self.num_bytes = 0
        self.fails = self.flips = False

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def read_range(self, digest, offset, length):
        if self.fails:
            raise UnavailableError("gone")
        self.num_bytes += length
        content = self._objects.read_range(digest, offset, length)
        return bytes([content[0] ^ 1]) + content[1:] if self.flips else content


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("source") / "pets", {"train": {"a": 60, "b": 60}})
    repository = Repository.create(str(tmp_path_factory.mktemp("repository") / "repo"))
    ingest(repository, str(folder), "pets", shard_bytes=8192)
    return open_dataset(repository, "pets@1")["train"]


def ignore(_name, _number):
    pass


def wanted(stored, shard, rows):
    return ShardRequest(stored.table.shard(shard), stored.table.index(shard), np.array(rows))


def blobs(shard, rows):
    return [bytes(view) for view in shard.blobs("image", np.array(rows))]


def test_samples_of_several_shards_come_without_their_shards(stored):
    objects = Counting(stored.repository.objects)
    counted = Counter()
    early = PartialShardReader(objects, 1 << 40, count=lambda name, number: counted.update({name: number}))
    found = early.read([wanted(stored, 0, [1, 0]), wanted(stored, 2, [2])])
    for shard, rows in ((0, [1, 0]), (2, [2])):
        info = stored.table.shard(shard)
        assert blobs(found[info.digest], rows) == blobs(stored.origin.open_shard(info), rows)
    before = objects.num_bytes
    assert counted == {"early_bytes": before, "origin_bytes": before}
    early.read([wanted(stored, 0, [0])])
    assert objects.num_bytes == before  # what is there is not read again


def test_no_more_is_read_than_the_share_of_the_rank(stored):
    objects = Counting(stored.repository.objects)
    split_bytes = 50 * stored.table.size_bytes  # two per cent of it are this stored
    assert PartialShardReader(objects, split_bytes, count=ignore).read([wanted(stored, 0, [0])])
    read = objects.num_bytes
    early = PartialShardReader(objects, split_bytes, num_ranks=stored.table.size_bytes // read, count=ignore)
    assert early.read([wanted(stored, 0, [0])])
    assert early.read([wanted(stored, 1, [0])]) == {}
    assert objects.num_bytes == 2 * read


@pytest.mark.parametrize("fault", ["fails", "flips"])
def test_what_cannot_be_read_or_is_wrong_is_left_to_the_whole_shard(stored, fault):
    objects = Counting(stored.repository.objects)
    setattr(objects, fault, True)
    early = PartialShardReader(objects, 1 << 40, count=ignore)
    assert early.read([wanted(stored, 0, [0])]) == {}
    setattr(objects, fault, False)
    assert early.read([wanted(stored, 0, [0])]) == {}  # and nothing is tried again


def test_a_shard_without_an_index_is_waited_for(stored):
    early = PartialShardReader(stored.repository.objects, 1 << 40, count=ignore)
    assert early.read([ShardRequest(stored.table.shard(0), None, np.array([0]))]) == {}


@pytest.mark.parametrize("config", [OrderConfig(seed=1), OrderConfig(seed=1, shuffle="windowed", lanes=2, block=8)])
def test_a_cold_start_serves_the_same_batches_as_the_origin(tmp_path, stored, config):
    def served(store):
        batches = SampleBatches(
            stored, store, config, batch_size=5, rank=0, world_size=1, tail="short", blob="image", columns=("label",)
        )
        for _, batch in zip(range(2 * -(-len(stored) // 5)), batches.stream(Cursor(0, 0)), strict=False):
            yield [bytes(blob) for blob in batch.blobs], batch.columns["label"].tolist()
            batches.retire(batch)
        batches.close()

    with Cache(tmp_path / "cache", budget="10MB") as cache:
        shards = PrefetchingShardStore(cache, stored, config)
        assert list(served(shards)) == list(served(stored.origin))
        shards.close()
        assert cache.counters()["misses"] <= stored.table.num_shards

"""Several jobs, and several orders of one process, that want the same objects: the one who needs it first counts."""

import pytest

from datasvc.order import NEVER, NextUse
from tests.cache.processes import are_there, hold_in_a_process, kill


@pytest.fixture
def orders(cache):
    """Two orders of this process."""
    return cache.new_job("train"), cache.new_job("validation")


def bring(cache, origin, job, next_uses, now=0):
    """Let an order have objects resident, and say when it needs them."""
    repository, infos = origin
    for info, next_use in zip(infos, next_uses, strict=False):
        cache.acquire(info, repository)
        job.release(info.digest, NextUse(now, next_use))


def record(cache, info):
    return cache._opened.catalogue.read(lambda tables: tables.get(info.digest))


def test_an_object_that_one_job_needs_soon_stays_when_another_releases_it(cache, origin, orders):
    repository, infos = origin
    train, validation = orders
    bring(cache, origin, train, [10, 900, 900, 900, 900])
    cache.acquire(infos[0], repository)
    validation.release(infos[0].digest, NextUse(0, 100_000))
    cache.acquire(infos[5], repository)
    assert are_there(cache, infos[:1]) == [True]
    assert (record(cache, infos[0]).job_id, record(cache, infos[0]).next_use) == (train.id, 10)


def test_uses_are_compared_as_what_each_job_still_reads(cache, origin, orders):
    """Clocks start with the job: 1,010 is in 10 for the one, 500 in 500 for the other."""
    repository, infos = origin
    train, validation = orders
    bring(cache, origin, train, [500])
    cache.acquire(infos[0], repository)
    validation.release(infos[0].digest, NextUse(1_000, 1_010))
    assert record(cache, infos[0]).job_id == validation.id
    train.expect({infos[0].digest: 400}, 0)
    assert record(cache, infos[0]).job_id == validation.id
    train.expect({infos[0].digest: 5}, 0)
    assert (record(cache, infos[0]).job_id, record(cache, infos[0]).next_use) == (train.id, 5)


def test_an_order_may_take_back_what_it_said_itself(cache, origin, orders):
    _, infos = origin
    bring(cache, origin, orders[0], [10])
    orders[0].expect({infos[0].digest: 5_000}, 0)
    assert record(cache, infos[0]).next_use == 5_000


def test_what_an_order_says_counts_more_than_what_its_process_did_not_know(cache, origin, orders):
    repository, infos = origin
    cache.acquire(infos[0], repository)  # the process has it now, with no use that is known
    orders[0].release(infos[0].digest, NextUse(0, NEVER))
    assert (record(cache, infos[0]).job_id, record(cache, infos[0]).next_use) == (orders[0].id, NEVER)


def test_a_use_that_passed_is_judged_by_the_clock_of_who_said_it(cache, origin, orders):
    """The other's clock stands at 10,000: its 20 is not the other's past."""
    _, infos = origin
    train, validation = orders
    bring(cache, origin, train, [20])
    validation.expect({infos[0].digest: 90_000}, 10_000, passed_only=True)
    assert (record(cache, infos[0]).job_id, record(cache, infos[0]).next_use) == (train.id, 20)
    train.expect({infos[0].digest: 300}, 10, passed_only=True)
    assert record(cache, infos[0]).next_use == 20
    train.expect({infos[0].digest: 300}, 21, passed_only=True)
    assert record(cache, infos[0]).next_use == 300


def test_what_a_dead_job_needed_soon_is_forgotten(cache, origin, orders):
    repository, infos = origin
    process = hold_in_a_process(cache, repository, infos[:1])
    other = next(job.lease_id for job in cache.status().jobs if job.lease_id.startswith(f"{process.pid}-"))
    cache._opened.catalogue.release(infos[0].digest, other, NextUse(0, 1))
    orders[0].expect({infos[0].digest: 700}, 0)
    assert record(cache, infos[0]).job_id == other
    kill(process)
    orders[0].expect({infos[0].digest: 700}, 0)
    assert record(cache, infos[0]).job_id == orders[0].id


def test_two_orders_of_one_process_have_clocks_of_their_own(cache, origin, orders):
    _, infos = origin
    train, validation = orders
    train.expect({infos[0].digest: 1}, 1_000_000)
    validation.expect({infos[0].digest: 1}, 3)
    clocks = {job.lease_id: (job.clock_bytes, job.note) for job in cache.status().jobs}
    assert (clocks[train.id], clocks[validation.id]) == ((1_000_000, "train"), (3, "validation"))


def test_what_an_order_that_ended_left_goes_first_also_while_its_process_lives(cache, origin, orders):
    repository, infos = origin
    train, validation = orders
    bring(cache, origin, train, [1, 2])
    for info in infos[2:5]:
        cache.acquire(info, repository)
        validation.release(info.digest, NextUse(0, 1_000))
    train.end()
    assert train.id not in {job.lease_id for job in cache.status().jobs}
    for info in infos[5:7]:
        cache.acquire(info, repository)
    assert are_there(cache, infos[:5]) == [False, False, True, True, True]


def test_an_ended_order_stays_ended_when_it_releases_an_object_late(cache, origin, orders):
    repository, infos = origin
    orders[0].end()
    for info in infos[:6]:  # full: whoever left nothing is forgotten
        cache.acquire(info, repository)
        orders[1].release(info.digest, NextUse(0, 10))
    cache.acquire(infos[6], repository)
    orders[0].release(infos[6].digest, NextUse(5, 10))
    assert orders[0].id not in {job.lease_id for job in cache.status().jobs}
    bring(cache, origin, orders[1], [10])
    cache.acquire(infos[7], repository)
    assert are_there(cache, infos[6:7]) == [False]


def test_a_prefetch_is_its_orders_own(cache, origin, orders):
    repository, infos = origin
    assert orders[1].prefetch(infos[0], repository, NextUse(3, 50)) == "origin"
    assert (record(cache, infos[0]).job_id, record(cache, infos[0]).next_use) == (orders[1].id, 50)

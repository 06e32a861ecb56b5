"""The catalogue against a model in memory: several jobs and tenants, at random, with deaths and full disks."""

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.cache.catalogue.files import Files
from datasvc.cache.catalogue.object_locks import Lease, ObjectLocks
from datasvc.cache.catalogue.quotas import NO_QUOTA, Quota
from datasvc.cache.catalogue.records import RESERVED, RESIDENT
from datasvc.cache.catalogue.recovery import open_catalogue
from datasvc.cache.catalogue.tables import CatalogueTables
from datasvc.errors import CacheFullError, ConfigError
from datasvc.order import NEVER, NextUse
from datasvc.repository import ObjectInfo
from datasvc.repository.objects.objects import digest_of
from tests.examples import examples

SHM = "/dev/shm"
BLOCK = 4096
CONTENTS = [bytes([number]) * (BLOCK * (number % 4) + 1) for number in range(12)]
INFOS = [ObjectInfo(digest_of(content), len(content)) for content in CONTENTS]
BY_DIGEST = {info.digest: number for number, info in enumerate(INFOS)}
TENANTS = ("default", "one", "two")

objects = st.integers(0, len(INFOS) - 1)
jobs = st.integers(0, 2)
reuses = st.one_of(
    st.none(),
    st.builds(lambda now, ahead: NextUse(now, now + ahead), st.integers(0, 100), st.integers(0, 1000)),
    st.builds(lambda now: NextUse(now, NEVER), st.integers(0, 100)),
)


class Job:
    """A process that has the cache open: a lease, and descriptors for its holds."""

    def __init__(self, folder):
        self.lease = Lease(folder / "leases")
        self.locks = ObjectLocks(folder / "holds")
        self.held = Counter()
        self.clock = 0

    def die(self):
        """What the kernel does when a process dies."""
        os.close(self.lease._descriptor)
        self.lease._descriptor = -1
        self.locks.close()


@dataclass
class Known:
    """What the model knows of an object."""

    state: int
    tenant: str
    owner: str
    next_use: int
    pins: set = field(default_factory=set)


class CatalogueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        # In memory where that is possible: what is set is synced to the disk, and here it is set again and again.
        self.folder = Path(tempfile.mkdtemp(dir=SHM if os.access(SHM, os.W_OK) else None)) / "cache"
        self.files = Files(self.folder)
        self.catalogue, self.presence = open_catalogue(self.files, ObjectLocks(self.folder / "holds"))
        self.jobs = [self.new_job() for _ in range(3)]
        self.order = []  # jobs as they came, before the last call
        self.known = {}
        self.pins = {}  # names by object
        self.budget, self.limit, self.quotas = 0, 0, {}
        self.set_budget(16)

    def teardown(self):
        self.catalogue.close()
        self.presence.close()
        for job in self.jobs:
            job.die()
        self.catalogue._locks.close()
        self.files.abandon()
        shutil.rmtree(self.folder.parent)

    def new_job(self):
        job = Job(self.folder)
        self.catalogue.register(job.lease.id, "")
        return job

    # What the model thinks.

    def used(self, tenant=None):
        return sum(
            self.size(number) for number, known in self.known.items() if tenant is None or known.tenant == tenant
        )

    @staticmethod
    def size(number):
        return -(-len(CONTENTS[number]) // BLOCK) * BLOCK

    def is_held(self, number):
        return any(job.held[number] for job in self.jobs)

    def evictable(self):
        return {
            number
            for number, known in self.known.items()
            if known.state == RESIDENT and not self.pins.get(number) and not self.is_held(number)
        }

    def living(self):
        return {job.lease.id: job.clock for job in self.jobs}

    def rank(self, number):
        """Of two objects the one that ranks higher goes first."""
        known = self.known[number]
        if known.owner in self.living():
            clock = 0 if known.next_use >= UNKNOWN else self.living()[known.owner]
            return 0, 0, known.next_use - clock
        return 1, -self.order.index(known.owner), known.next_use

    def observe(self, tenant, before_used):
        """Take over what a call evicted, having checked that it might."""
        actual = {BY_DIGEST[digest] for digest in self.catalogue.objects()}
        gone = set(self.known) - actual
        evictable = self.evictable()
        evicted = {number for number in gone if self.known[number].state == RESIDENT}
        assert evicted <= evictable, "held or pinned"
        for number in gone - evicted:
            assert self.known[number].owner not in self.living(), "a living fetch was swept"
        if evicted and not self.quotas:
            least = min(self.rank(number) for number in evicted)
            kept = evictable - evicted
            assert all(self.rank(number) <= least for number in kept), "something else was needed further ahead"
        for number in gone:
            del self.known[number]
        for name in TENANTS:
            guaranteed = self.quotas.get(name, NO_QUOTA).guaranteed_bytes
            # Its own last object may straddle the guarantee; and what a dead fetch had reserved nobody needs.
            if tenant is not None and name != tenant and gone == evicted:
                assert self.used(name) >= min(before_used[name], guaranteed), f"{name} is below its guarantee"

    def before(self):
        self.order = [name for _, name, _, _ in self.catalogue.read(CatalogueTables.jobs)]
        return {name: self.used(name) for name in TENANTS}

    # What happens.

    @initialize(
        quotas=st.sampled_from(
            [{}, {"one": Quota(6 * BLOCK)}, {"one": Quota(4 * BLOCK), "two": Quota(0, 6 * BLOCK)}]
        ),
        uses=st.lists(st.tuples(jobs, objects, st.sampled_from(TENANTS), reuses), min_size=3, max_size=10),
    )
    def begin(self, quotas, uses):
        """Something is there already, of several jobs and tenants."""
        self.quotas = quotas
        self.catalogue.configure(lambda found: replace(found, quotas=quotas))
        for job, number, tenant, reuse in uses:
            self.reserve(job=job, number=number, tenant=tenant, prefetch=reuse or NextUse(0, 1))

    @rule(blocks=st.integers(4, 24))
    def set_budget(self, blocks):
        before = self.before()
        try:
            self.catalogue.configure(lambda found: replace(found, budget_bytes=blocks * BLOCK))
        except ConfigError:
            assert sum(quota.guaranteed_bytes for quota in self.quotas.values()) > blocks * BLOCK
            return
        self.budget = self.limit = blocks * BLOCK
        self.observe(None, before)

    @rule(tenant=st.sampled_from(TENANTS), least=st.integers(0, 8), more=st.one_of(st.none(), st.integers(1, 8)))
    def set_quota(self, tenant, least, more):
        before = self.before()
        quota = Quota(least * BLOCK, None if more is None else (least + more) * BLOCK)
        quotas = {**self.quotas, tenant: quota}
        try:
            self.catalogue.configure(lambda found: replace(found, quotas=quotas))
        except ConfigError:
            assert sum(each.guaranteed_bytes for each in quotas.values()) > self.budget
            return
        self.quotas, self.limit = quotas, self.budget
        self.observe(None, before)

    @rule()
    def forget_quotas(self):
        before = self.before()
        self.catalogue.configure(lambda found: replace(found, quotas={}))
        self.quotas, self.limit = {}, self.budget
        self.observe(None, before)

    @rule(job=jobs, number=objects, tenant=st.sampled_from(TENANTS), prefetch=reuses)
    def reserve(self, job, number, tenant, prefetch):
        asking, info, before = self.jobs[job], INFOS[number], self.before()
        known = self.known.get(number)
        if prefetch is None:
            asking.locks.acquire(info.digest)
            asking.held[number] += 1
        room = self.evictable()
        try:
            answer = self.catalogue.reserve(info, asking.lease.id, tenant, prefetch=prefetch)
        except CacheFullError:
            answer = None
        self.observe(tenant, before)
        if answer == "reserved":
            payer = tenant if known is None else known.tenant
            self.known[number] = Known(RESERVED, payer, asking.lease.id, 0)
            if known is None:
                self.check_rules(payer)
        elif answer == "resident":
            assert known.state == RESIDENT
        elif answer == "busy":
            assert known.state == RESERVED
            assert known.owner in self.living()
        else:
            assert known is None
            assert (answer == "later") == (prefetch is not None)
            if not self.quotas and self.limit == self.budget and prefetch is None:
                assert self.used() - sum(map(self.size, room)) + self.size(number) > self.limit
        if prefetch is None and answer not in {"reserved", "resident"}:
            asking.locks.release(info.digest)
            asking.held[number] -= 1
        if prefetch is not None and answer == "reserved":
            self.finish(number, prefetch)

    def check_rules(self, tenant):
        """What was granted keeps the budget, all guarantees, and the maximum of who got it."""
        maximum = self.quotas.get(tenant, NO_QUOTA).maximum_bytes
        assert maximum is None or self.used(tenant) <= maximum
        cut = self.limit < self.budget
        charged = sum(
            max(self.used(name), 0 if cut else self.quotas.get(name, NO_QUOTA).guaranteed_bytes) for name in TENANTS
        )
        assert charged <= self.limit

    def reserved(self):
        living = self.living()
        return sorted(n for n, known in self.known.items() if known.state == RESERVED and known.owner in living)

    @precondition(reserved)
    @rule(data=st.data(), reuse=reuses)
    def complete(self, data, reuse):
        self.finish(data.draw(st.sampled_from(self.reserved())), reuse)

    def finish(self, number, reuse):
        known, info = self.known[number], INFOS[number]
        os.pwrite(self.files.incoming(info.digest), CONTENTS[number], 0)
        self.catalogue.complete(info.digest, known.owner, publish=True, reuse=reuse)
        self.files.unlock(info.digest)
        known.state = RESIDENT
        self.take_next_use(number, known.owner, reuse)

    def take_next_use(self, number, owner, reuse):
        record = self.catalogue.read(lambda tables: tables.get(INFOS[number].digest))
        known = self.known[number]
        if reuse is None:
            released = [each.next_use for each in self.known.values() if UNKNOWN <= each.next_use < NEVER]
            assert record.next_use > max([UNKNOWN, *released])
        else:
            assert record.next_use == reuse.next_use
            for job in self.jobs:
                if job.lease.id == owner:
                    job.clock = reuse.now
        known.next_use = record.next_use

    @precondition(reserved)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(self.reserved()))
        self.catalogue.drop(INFOS[number].digest, self.known[number].owner)
        self.files.unlock(INFOS[number].digest)
        del self.known[number]

    @rule(job=jobs, data=st.data(), reuse=reuses)
    def release(self, job, data, reuse):
        held = sorted(number for number, count in self.jobs[job].held.items() if count and number in self.known)
        held = [number for number in held if self.known[number].state == RESIDENT]
        if not held:
            return
        number = data.draw(st.sampled_from(held))
        self.jobs[job].locks.release(INFOS[number].digest)
        self.jobs[job].held[number] -= 1
        self.catalogue.release(INFOS[number].digest, self.jobs[job].lease.id, reuse)
        if reuse is not None:
            self.jobs[job].clock = reuse.now
        released = [each.next_use for each in self.known.values() if UNKNOWN <= each.next_use < NEVER]
        next_use = max([UNKNOWN, *released]) + 1 if reuse is None else reuse.next_use
        if self.takes_over(number, self.jobs[job], next_use):
            self.known[number].owner = self.jobs[job].lease.id
            self.take_next_use(number, self.jobs[job].lease.id, reuse)

    def takes_over(self, number, job, next_use):
        """Another job that lives, and needs the object as soon, has its way."""
        known = self.known[number]
        if known.owner == job.lease.id or known.owner not in self.living():
            return True
        return self.left(next_use, job.clock) < self.left(known.next_use, self.living()[known.owner])

    @staticmethod
    def left(next_use, clock):
        return next_use if next_use >= UNKNOWN else next_use - clock

    @rule(job=jobs, wanted=st.dictionaries(objects, st.integers(0, 1000), max_size=5), now=st.integers(0, 100))
    def expect(self, job, wanted, now):
        asking = self.jobs[job]
        self.catalogue.expect({INFOS[n].digest: use for n, use in wanted.items()}, asking.lease.id, now)
        asking.clock = now
        for number, use in wanted.items():
            known = self.known.get(number)
            if known is not None and known.state == RESIDENT and self.takes_over(number, asking, use):
                known.owner, known.next_use = asking.lease.id, use

    @rule(number=objects, name=st.sampled_from(["p", "q"]))
    def pin(self, number, name):
        self.catalogue.pin(name, {INFOS[number].digest: 1})
        self.pins.setdefault(number, set()).add(name)

    @rule(number=objects, name=st.sampled_from(["p", "q"]))
    def unpin(self, number, name):
        self.catalogue.unpin(name, {INFOS[number].digest: 1})
        self.pins.setdefault(number, set()).discard(name)

    @rule(number=objects, replaced=st.booleans())
    def invalidate(self, number, replaced):
        known, digest = self.known.get(number), INFOS[number].digest
        inode = (self.files.inode(digest) or 0) + replaced
        verdict = self.catalogue.invalidate(digest, inode)
        if known is None or known.state != RESIDENT or replaced:
            assert verdict == "superseded"
            return
        assert verdict == ("held" if self.is_held(number) else "unused")
        del self.known[number]

    @precondition(reserved)
    @rule(data=st.data())
    def the_disk_is_full(self, data):
        number, before = data.draw(st.sampled_from(self.reserved())), self.before()
        room = self.evictable()
        total = self.catalogue.read(CatalogueTables.account).total_bytes
        try:
            self.catalogue.shrink(INFOS[number].digest, 0)
        except CacheFullError:
            freed = sum(map(self.size, room))
            needed = max(self.size(number), 64 << 10)
            if not self.quotas and not self.dead_reserved() and total <= self.limit:
                assert freed < needed, "there was something to evict"
            self.observe(self.known[number].tenant, before)
            assert self.catalogue.read(CatalogueTables.account).budget_bytes == self.limit
            return
        self.limit = self.catalogue.read(CatalogueTables.account).budget_bytes
        assert self.limit < total
        self.observe(self.known[number].tenant, before)
        assert self.catalogue.read(CatalogueTables.account).total_bytes <= self.limit

    def dead_reserved(self):
        return [n for n, known in self.known.items() if known.state == RESERVED and n not in self.reserved()]

    @rule(job=jobs)
    def die(self, job):
        """Killed: its fetches stand half-way, its holds are gone, another job comes."""
        dying = self.jobs[job]
        for number in self.reserved():
            if self.known[number].owner == dying.lease.id:
                self.files.unlock(INFOS[number].digest)
        dying.die()
        self.jobs[job] = self.new_job()

    # What holds at every instant.

    @invariant()
    def the_catalogue_says_what_the_model_says(self):
        records = self.catalogue.objects()
        assert {BY_DIGEST[digest] for digest in records} == set(self.known)
        for digest, record in records.items():
            known = self.known[BY_DIGEST[digest]]
            assert (record.state, record.tenant) == (known.state, known.tenant)
            if record.state == RESIDENT:
                assert (record.job_id, record.next_use) == (known.owner, known.next_use)

    @invariant()
    def what_is_counted_is_what_lies_there(self):
        account = self.catalogue.read(CatalogueTables.account)
        assert account.used_bytes == {name: self.used(name) for name in TENANTS if self.used(name)}
        in_quarantine = [path.stat().st_size for path in (self.folder / "quarantine").iterdir()]
        assert account.quarantined_bytes == sum(-(-size // BLOCK) * BLOCK for size in in_quarantine)
        there = {path.name for path in (self.folder / "objects").rglob("*") if path.is_file()}
        assert there == {INFOS[n].digest for n, known in self.known.items() if known.state == RESIDENT}
        incoming = {path.name for path in (self.folder / "incoming").iterdir()}
        assert incoming == {INFOS[n].digest for n, known in self.known.items() if known.state == RESERVED}


TestCatalogueMachine = CatalogueMachine.TestCase
TestCatalogueMachine.settings = examples(150, stateful_step_count=40, deadline=None)

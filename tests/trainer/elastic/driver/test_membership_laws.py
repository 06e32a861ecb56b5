"""Laws of the membership, held by a world that does anything at any time: hosts, asks, deaths, finishes, waits."""

import math

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: F401

from datasvc.trainer.elastic.driver.actions import AssignRank, DenyRank, Finish, PrintMessage, Start, TerminateWorker
from datasvc.trainer.elastic.driver.limits import Limits
from datasvc.trainer.elastic.driver.membership import JobMembership
from datasvc.trainer.launch.ranks.job import Host
from datasvc.trainer.rendezvous.messages import RankRequest, ScriptError
from tests.examples import examples

TIMEOUT_S = 50.0
COOLDOWN_S = (8.0, 20.0)
NAMES = ("a", "b", "c")


class Process:
    """A worker as the machine sees it."""

    def __init__(self, name, host):
        self.name, self.host = name, host
        self.slot = int(name.split(":")[1])
        self.num_asks, self.serial, self.assignment = 0, 0, None
        self.is_asking = self.is_told_to_end = False


class MembershipLaws(RuleBasedStateMachine):
    @initialize(
        first=st.integers(1, 3),
        least=st.integers(1, 2),
        most=st.none() | st.integers(3, 4),
        cooldown=st.sampled_from([None, COOLDOWN_S]),
        reset_limit=st.none() | st.integers(0, 3),
        start_timeout_s=st.none() | st.just(TIMEOUT_S),
        multiple=st.integers(1, 2),
    )
    def begin(self, first, least, most, cooldown, reset_limit, start_timeout_s, multiple):
        self.multiple = multiple
        self.limits = Limits(
            first_num_ranks=max(first, least),
            min_num_ranks=least,
            max_num_ranks=most,
            elastic_timeout_s=TIMEOUT_S,
            hang_timeout_s=TIMEOUT_S,
            start_timeout_s=start_timeout_s,
            reset_limit=reset_limit,
            cooldown_range_s=cooldown,
            hosts_can_change=True,
        )
        self.now_s = 0.0
        self.membership = JobMembership(self.limits, now_s=0.0)
        self.alive = {}
        self.slots = {}
        self.barred_until_s = {}
        self.newest_round = 0
        self.was_good_end = False
        self.newest_commit = 0
        self.finish = None
        self.take(self.membership.hosts_found([Host("a", 2)], 0.0), {"a": 2})

    def take(self, actions, slots=None):
        assert self.finish is None or not actions, "nothing is decided after the end"
        self.slots = self.slots if slots is None else slots
        seated = [action for action in actions if isinstance(action, AssignRank)]
        for action in actions:
            match action:
                case Start(worker, host, place):
                    assert 0 <= place.rank < place.size
                    assert host in self.slots
                    assert self.now_s >= self.barred_until_s.get(host, -math.inf), "a barred host got a worker"
                    process = self.alive[worker] = Process(worker, host)
                    assert place.local_rank == process.slot, "another process may have that GPU"
                case TerminateWorker(worker):
                    self.alive[worker].is_told_to_end = True
                case DenyRank(worker, number, _):
                    process = self.alive[worker]
                    assert process.is_asking
                    assert number == process.num_asks
                    process.is_told_to_end, process.is_asking = True, False
                case Finish():
                    assert action is actions[-1]
                    self.finish = action
        if seated:
            self.check_round(seated, actions)

    def check_round(self, seated, actions):
        old = {action.worker: self.alive[action.worker].assignment for action in seated}
        (round_number,) = {action.assignment.round_number for action in seated}
        assert round_number == self.newest_round + 1
        self.newest_round = round_number
        places = [action.assignment.placement for action in seated]
        assert [place.rank for place in places] == list(range(len(seated)))
        assert {place.size for place in places} == {len(seated)}
        processes = [self.alive[action.worker] for action in seated]
        for action, process in zip(seated, processes, strict=True):
            assert process.is_asking
            assert action.number == process.num_asks
            neighbours = [other for other in processes if other.host == process.host]
            assert action.assignment.placement.local_size == len(neighbours)
            if process.slot < len(neighbours):
                assert action.assignment.placement.local_rank == process.slot
        local_places = {(process.host, place.local_rank) for process, place in zip(processes, places, strict=True)}
        assert len(local_places) == len(places)
        waiting = [p for p in self.alive.values() if p.is_asking and not p.is_told_to_end]
        if self.multiple == 1:
            assert processes[0].serial == max(process.serial for process in waiting), "rank 0 has the newest state"
        self.check_replicas(processes, old)
        if len({process.serial for process in processes}) > 1:
            assert all(action.assignment.needs_sync for action in seated)
        for serial in {process.serial for process in processes}:
            ranks = [
                math.inf if old[p.name] is None else old[p.name].placement.rank
                for p in processes
                if p.serial == serial
            ]
            if self.multiple == 1:
                assert ranks == sorted(ranks), "among equals the old ranks come first, in their order"
        if len(seated) < self.limits.min_num_ranks:
            assert any(isinstance(action, PrintMessage) and "finishes with" in action.text for action in actions)
        members = [
            p
            for p in self.alive.values()
            if p.assignment
            and not p.is_told_to_end
            and p not in processes
            and not (self.multiple > 1 and p.is_asking)
        ]
        assert not members, "a living member was left behind"
        for action, process in zip(seated, processes, strict=True):
            process.assignment, process.is_asking = action.assignment, False

    def check_replicas(self, processes, old):
        """All rounds have whole replicas, and those of the last round of which all ranks are left stay together."""
        assert len(processes) % self.multiple == 0
        replicas = {}
        for process in processes:
            if old[process.name] is not None and old[process.name].round_number == self.newest_round - 1:
                rank = old[process.name].placement.rank
                replicas.setdefault(rank // self.multiple, []).append((rank, processes.index(process)))
        for ranks in replicas.values():
            if len(ranks) == self.multiple and self.multiple > 1:
                (first, now), (_, next_now) = sorted(ranks)
                assert (now % self.multiple, next_now) == (first % self.multiple, now + 1)

    def pick(self, data, chosen):
        return data.draw(st.sampled_from(sorted(chosen, key=lambda process: process.name)))

    def processes(self, *, asking):
        return [p for p in self.alive.values() if p.is_asking == asking and not p.is_told_to_end]

    @rule(data=st.data())
    def hosts_change(self, data):
        slots = data.draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2), min_size=1))
        self.take(self.membership.hosts_found([Host(n, s) for n, s in slots.items()], self.now_s), slots)

    @precondition(lambda self: self.processes(asking=False))
    @rule(data=st.data(), wants_sync=st.booleans())
    def a_worker_asks(self, data, wants_sync):
        self.ask(self.pick(data, self.processes(asking=False)), wants_sync=wants_sync)

    def ask(self, process, *, wants_sync=True):
        process.num_asks += 1
        process.is_asking = True
        wants_sync = wants_sync or not process.serial
        ask = RankRequest(process.name, process.num_asks, process.serial, wants_sync, self.multiple)
        self.take(self.membership.rank_requested(ask, self.now_s))

    @rule(data=st.data())
    def members_commit(self, data):
        # All of a round that still run, or some of them before the next death.
        members = [
            p for p in self.processes(asking=False) if p.assignment and p.assignment.round_number == self.newest_round
        ]
        if not members:
            return
        newest = max(process.serial for process in members)
        for process in members:
            if data.draw(st.booleans()) or process.serial < newest:
                process.serial = max(newest, process.serial + 1)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), returncode=st.sampled_from([-9, -9, 1]))
    def a_worker_dies(self, data, returncode):
        process = self.pick(data, self.alive.values())
        self.end(process, returncode)

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data())
    def a_worker_dies_and_its_host_comes_back(self, data):
        self.end(self.pick(data, self.alive.values()), -9)
        self.time_passes(COOLDOWN_S[1])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_program_raises(self, data):
        process = self.pick(data, self.alive.values())
        self.take(self.membership.script_failed(ScriptError(process.name, "KeyError: 1"), self.now_s))
        self.end(process, 1)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_command_runs(self, data):
        self.take(self.membership.worker_started(self.pick(data, self.alive.values()).name, self.now_s))

    @precondition(lambda self: any(p.assignment for p in self.processes(asking=False)))
    @rule(data=st.data())
    def a_member_finishes(self, data):
        self.end(self.pick(data, [p for p in self.processes(asking=False) if p.assignment]), 0)

    def end(self, process, returncode):
        del self.alive[process.name]
        is_failure = returncode and not process.is_told_to_end
        if is_failure and self.now_s >= self.barred_until_s.get(process.host, -math.inf):
            cooldown_s = math.inf if self.limits.cooldown_range_s is None else COOLDOWN_S[0]
            self.barred_until_s[process.host] = self.now_s + cooldown_s
        self.take(self.membership.worker_ended(process.name, returncode, self.now_s))

    @rule(seconds=st.sampled_from([1.0, 9.0, 60.0]))
    def time_passes(self, seconds):
        self.now_s += seconds
        for process in list(self.alive.values()):
            process.late = True
        self.take(self.membership.time_passed(self.now_s))
        # Hosts of workers that were ended for being late are barred too; when, the machine does not count.
        self.forget_bars()

    def forget_bars(self):
        for process in self.alive.values():
            if process.is_told_to_end:
                self.barred_until_s.pop(process.host, None)

    @invariant()
    def no_slot_is_used_twice(self):
        if hasattr(self, "alive"):
            slots = [(process.host, process.slot) for process in self.alive.values()]
            assert len(slots) == len(set(slots))

    @invariant()
    def the_next_deadline_is_not_missed(self):
        if hasattr(self, "alive") and self.finish is None:
            deadline_s = self.membership.next_deadline_s()
            assert deadline_s is None or deadline_s > self.now_s, "it would be asked again and again"

    def teardown(self):
        """Whatever has happened: when all do their duty from now on, the job ends."""
        if not hasattr(self, "alive"):
            return
        for _ in range(200):
            if self.finish is not None:
                return
            told = [process for process in self.alive.values() if process.is_told_to_end]
            idle = self.processes(asking=False)
            asking = [process.assignment for process in self.processes(asking=True) if process.assignment]
            broken = any(assignment.round_number == self.newest_round for assignment in asking)
            if told:
                self.end(told[0], 0)
            elif idle and (broken or not idle[0].assignment):
                self.ask(idle[0])
            elif idle:
                self.end(idle[0], 0)
            else:
                deadline_s = self.membership.next_deadline_s()
                assert deadline_s is not None, "nothing will ever happen again"
                self.now_s = deadline_s
                self.take(self.membership.time_passed(self.now_s))
                self.forget_bars()
        raise AssertionError("the job does not end")


TestMembershipLaws = MembershipLaws.TestCase
TestMembershipLaws.settings = examples(40, stateful_step_count=40, deadline=None)

"""What the driver of an elastic job decides, without processes: a small world does what it is told."""

import pytest

from datasvc.trainer.elastic.driver.actions import (
    Announce,
    AssignRank,
    Break,
    DenyRank,
    Finish,
    PrintMessage,
    Start,
    TerminateWorker,
)
from datasvc.trainer.elastic.driver.limits import Limits, plan_limits
from datasvc.trainer.elastic.driver.membership import JobMembership
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, LaunchJob
from datasvc.trainer.rendezvous.messages import RankRequest, ScriptError, SilentRanks

TIMEOUT_S = 100.0


class World:
    """Feeds events to a membership and keeps what it decided."""

    def __init__(self, **limits):
        self.limits = Limits(**{"elastic_timeout_s": TIMEOUT_S, **limits})
        self.now_s = 0.0
        self.membership = JobMembership(self.limits, now_s=0.0)
        self.started, self.seats, self.said, self.num_asks, self.predicted = [], {}, [], {}, {}
        self.last, self.finish = [], None

    def take(self, actions):
        self.last = actions
        for action in actions:
            match action:
                case Start(worker, _, place):
                    self.started.append(worker)
                    self.predicted[worker] = place
                case AssignRank(worker, _, seat):
                    self.seats[worker] = seat
                case PrintMessage(text):
                    self.said.append(text)
                case Finish():
                    self.finish = action
        return actions

    def hosts(self, **slots):
        return self.take(self.membership.hosts_found([Host(n, s) for n, s in slots.items()], self.now_s))

    def ask(self, *workers, serial=0, wants_sync=True):
        for worker in workers:
            self.num_asks[worker] = self.num_asks.get(worker, 0) + 1
            ask = RankRequest(worker, self.num_asks[worker], serial, wants_sync)
            self.take(self.membership.rank_requested(ask, self.now_s))
        return self.last

    def come(self, *workers):
        for worker in workers:
            self.take(self.membership.worker_started(worker, self.now_s))

    def fail(self, worker, text="MemoryError: full", returncode=1, *, ends_job=False):
        """The program of a worker raises, which its process reports before it ends."""
        self.take(self.membership.script_failed(ScriptError(worker, text, ends_job), self.now_s))
        return self.end(worker, returncode)

    def end(self, worker, returncode=-9, **how):
        return self.take(self.membership.worker_ended(worker, returncode, self.now_s, **how))

    def wait(self, seconds):
        self.now_s += seconds
        return self.take(self.membership.time_passed(self.now_s))

    def ranks(self):
        newest = max(seat.round_number for seat in self.seats.values())
        return [
            w
            for w, seat in sorted(self.seats.items(), key=lambda x: x[1].placement.rank)
            if seat.round_number == newest
        ]

    def kinds(self, kind):
        return [action for action in self.last if isinstance(action, kind)]


def running(first_num_ranks=2, hosts=None, **limits):
    """A world whose first round runs, on hosts a and b unless others are given."""
    world = World(first_num_ranks=first_num_ranks, **limits)
    world.hosts(**(hosts or {"a": 1, "b": 1}))
    world.ask(*world.started)
    assert world.seats
    return world


def test_the_first_round_waits_until_all_that_were_started_have_come():
    world = World(first_num_ranks=2)
    world.hosts(a=2, b=1)
    assert world.started == ["a:0:0", "a:1:1", "b:0:2"]
    world.ask("b:0:2", "a:0:0")
    assert not world.seats
    world.ask("a:1:1")
    assert world.ranks() == ["a:0:0", "a:1:1", "b:0:2"]
    place = world.seats["b:0:2"].placement
    assert (place.rank, place.size, place.local_rank, place.local_size) == (2, 3, 0, 1)
    assert (place.cross_rank, place.cross_size) == (1, 2)
    assert all(seat.needs_sync for seat in world.seats.values())


def test_no_more_ranks_than_the_most_are_started():
    world = World(first_num_ranks=2, max_num_ranks=3)
    world.hosts(a=2, b=2)
    assert len(world.started) == 3


def test_a_death_breaks_the_round_and_the_others_keep_their_order():
    world = running(3, {"a": 1, "b": 1, "c": 1})
    world.end("a:0:0")
    assert world.kinds(Break) == [Break(1, "rank 0, worker a:0:0 has exited")]
    assert "killed by SIGKILL; host a gets no new ranks, the others continue" in world.said[-1]
    world.ask("c:0:2", "b:0:1", serial=5)
    assert world.ranks() == ["b:0:1", "c:0:2"]
    assert world.seats["b:0:1"].round_number == 2


def test_the_trouble_with_a_host_is_reported_in_place_of_the_return_code():
    world = running()
    world.end("b:0:1", 255, trouble="was lost: ssh to b exited with status 255")
    assert "worker b:0:1 was lost: ssh to b exited with status 255; host b gets no new ranks" in world.said[-1]
    world.end("a:0:0", 126, trouble="was not started: no way to the launcher")
    assert (world.finish.exit_status, world.finish.worker) == (255, "b:0:1")
    assert world.finish.reason.startswith("was lost: ssh to b exited with status 255; no rank that had the")
    assert world.finish.others == ("rank 0, worker a:0:0 was not started: no way to the launcher",)


def test_a_round_begins_only_after_all_living_members_have_requested_a_rank():
    world = running(3, {"a": 1, "b": 1, "c": 1})
    world.end("c:0:2")
    world.ask("a:0:0", serial=5)
    assert world.seats["a:0:0"].round_number == 1
    world.end("b:0:1")
    assert world.ranks() == ["a:0:0"]


def test_rank_0_has_the_newest_commit_that_any_living_rank_has_seen():
    world = running(3, {"a": 1, "b": 1, "c": 1})
    world.end("a:0:0")
    world.ask("b:0:1", serial=7)
    world.ask("c:0:2", serial=8)
    assert world.ranks() == ["c:0:2", "b:0:1"]
    assert world.seats["b:0:1"].needs_sync


def test_a_new_host_gets_workers_at_once_and_the_members_get_a_notice_when_these_have_joined():
    world = running(hosts_can_change=True)
    assert [a.worker for a in world.hosts(a=1, b=1, c=1)] == ["c:0:2"]
    (announced,) = world.ask("c:0:2")
    assert isinstance(announced, Announce)
    assert announced.notice.result == 2
    assert world.seats["a:0:0"].round_number == 1
    world.ask("a:0:0", "b:0:1", serial=3)
    assert world.ranks() == ["a:0:0", "b:0:1", "c:0:2"]
    assert world.seats["c:0:2"].notice == announced.notice.number
    assert world.seats["a:0:0"].needs_sync


def test_the_workers_of_a_host_that_goes_leave_at_the_next_commit_and_no_sync_is_needed():
    world = running(hosts_can_change=True)
    (announced,) = world.hosts(a=1)
    assert announced.notice.result == 1
    world.ask("a:0:0", "b:0:1", serial=3, wants_sync=False)
    assert [(d.worker, d.number) for d in world.kinds(DenyRank)] == [("b:0:1", 2)]
    assert world.ranks() == ["a:0:0"]
    assert not world.seats["a:0:0"].needs_sync
    world.end("b:0:1", 0)
    assert world.finish is None
    world.end("a:0:0", 0)
    assert world.finish == Finish(0)


def test_hosts_that_come_while_others_go_make_it_both_and_a_sync():
    world = running(hosts_can_change=True)
    world.hosts(a=1)
    world.hosts(a=1, c=1)
    world.ask("a:0:0", serial=3, wants_sync=False)
    (announced,) = world.ask("c:0:2")
    assert announced.notice.result == 3
    world.ask("b:0:1", serial=3, wants_sync=False)
    assert world.ranks() == ["a:0:0", "c:0:2"]
    assert world.seats["a:0:0"].needs_sync


def test_when_all_hosts_are_replaced_the_old_ranks_hand_the_state_over_before_they_leave():
    world = running(hosts_can_change=True)
    world.hosts(c=1, d=1)
    world.ask("c:0:2", "d:0:3")
    world.ask("a:0:0", "b:0:1", serial=3)
    assert world.ranks() == ["a:0:0", "b:0:1", "c:0:2", "d:0:3"]
    assert world.kinds(Announce), "they leave at the next commit"
    world.ask("a:0:0", "b:0:1", "c:0:2", "d:0:3", serial=5, wants_sync=False)
    assert world.ranks() == ["c:0:2", "d:0:3"]


def test_the_newest_worker_of_a_host_with_a_slot_less_leaves():
    world = running(3, {"a": 3}, hosts_can_change=True)
    world.hosts(a=2)
    world.ask(*world.started, serial=3, wants_sync=False)
    assert world.ranks() == ["a:0:0", "a:1:1"]


def test_without_enough_ranks_the_job_waits_with_a_message_and_fails_after_the_limit():
    world = running(min_num_ranks=2, hosts_can_change=True)
    world.end("b:0:1")
    world.ask("a:0:0", serial=3)
    assert "1 of the 2 required ranks (--min-num-proc) are available: waiting for hosts" in world.said[-1]
    world.wait(TIMEOUT_S)
    assert world.finish.exit_status == 128 + 9
    assert world.finish.worker == "b:0:1"
    assert "no more joined within 100 s" in world.finish.reason


def test_waiting_for_ranks_that_cannot_come_is_not_tried():
    world = running(min_num_ranks=2)
    world.end("b:0:1")
    world.ask("a:0:0", serial=3)
    assert "no host has a free slot" in world.finish.reason


def test_a_host_that_failed_gets_a_new_rank_after_its_cooldown_which_doubles():
    world = running(min_num_ranks=2, cooldown_range_s=(10.0, 15.0))
    for cooldown_s in (10.0, 15.0, 15.0):
        victim = world.started[-1]
        world.end(victim)
        assert not world.kinds(Start)
        world.ask("a:0:0", serial=3)
        world.wait(cooldown_s - 1.0)
        assert not world.kinds(Start)
        world.wait(1.0)
        (start,) = world.kinds(Start)
        assert start.host == "b"
        world.ask(start.worker)
        assert world.ranks() == ["a:0:0", start.worker]


def test_the_end_of_a_cooldown_before_the_next_deadline_is_read_is_not_missed():
    world = running(min_num_ranks=2, cooldown_range_s=(0.01, 0.01))
    world.end(world.started[-1])
    world.ask("a:0:0", serial=3)
    # The driver may ask later than this, since it prints messages first.
    deadline_s = world.membership.next_deadline_s()
    assert deadline_s == pytest.approx(world.now_s + 0.01)
    world.wait(5.0)
    assert [start.host for start in world.kinds(Start)] == ["b"]
    assert world.membership.next_deadline_s() > world.now_s


def test_the_end_of_the_wait_for_slots_before_the_next_deadline_is_read_is_not_missed():
    world = World(first_num_ranks=2, elastic_timeout_s=5.0, hosts_can_change=True)
    world.hosts(a=1)
    assert world.membership.next_deadline_s() == 5.0
    world.wait(60.0)
    assert [start.host for start in world.kinds(Start)] == ["a"]
    assert world.membership.next_deadline_s() > world.now_s


def test_a_replacement_gets_the_local_rank_of_the_slot_that_it_fills():
    world = running(2, {"a": 2}, cooldown_range_s=(10.0, 10.0))
    world.end("a:0:0")
    world.ask("a:1:1", serial=3)
    assert world.seats["a:1:1"].placement.local_rank == 0, "it is alone"
    world.wait(10.0)
    assert world.started[-1] == "a:0:2"
    # The survivor may have chosen its GPU by the local rank that it was started with.
    assert [world.predicted[worker].local_rank for worker in ("a:1:1", "a:0:2")] == [1, 0]
    world.ask("a:0:2")
    world.ask("a:1:1", serial=3)
    assert world.ranks() == ["a:1:1", "a:0:2"]
    assert [world.seats[worker].placement.local_rank for worker in world.ranks()] == [1, 0]


def test_ranks_that_stay_keep_their_local_rank_where_it_is_below_their_number():
    world = running(3, {"a": 3})
    world.end("a:0:0")
    world.ask("a:1:1", "a:2:2", serial=3)
    assert [world.seats[worker].placement.local_rank for worker in ("a:1:1", "a:2:2")] == [1, 0]


def test_a_worker_is_not_started_with_the_local_rank_of_one_that_is_still_being_ended():
    world = running(3, {"a": 2, "b": 1}, cooldown_range_s=(1.0, 1.0))
    world.take(world.membership.script_failed(ScriptError("a:0:0", "MemoryError: full"), world.now_s))
    world.wait(30.0)
    assert world.kinds(TerminateWorker) == [TerminateWorker("a:0:0")]
    world.end("a:1:1")
    world.wait(1.0)
    assert world.started[-1] == "a:1:3"
    assert world.predicted["a:1:3"].local_rank == 1


def test_ranks_that_die_together_on_a_host_are_one_failure_of_it():
    world = running(3, {"a": 1, "b": 2}, cooldown_range_s=(10.0, 80.0))
    world.end("b:0:1")
    world.end("b:1:2")
    world.wait(10.0)
    assert len(world.kinds(Start)) == 2


def test_the_loss_of_the_only_state_ends_the_job():
    world = running(hosts_can_change=True)
    world.hosts(a=1, b=1, c=1)
    world.ask("c:0:2")
    world.ask("a:0:0", "b:0:1", serial=3)
    world.end("a:0:0")
    world.end("b:0:1")
    assert world.finish is None
    world.ask("c:0:2", serial=0)
    assert world.finish.worker == "a:0:0"
    assert "no rank that had the training's state is left" in world.finish.reason


def test_when_all_members_die_the_job_ends_with_the_first_of_them():
    world = running(hosts_can_change=True)
    world.hosts(a=1, b=1, c=1)
    world.end("b:0:1", -11)
    world.end("a:0:0")
    assert (world.finish.worker, world.finish.exit_status) == ("b:0:1", 128 + 11)


def test_an_error_that_no_round_would_mend_ends_the_job_with_its_words():
    world = running()
    world.ask("a:0:0", serial=2)
    world.fail("b:0:1", "HorovodInternalError: no", ends_job=True)
    assert world.finish == Finish(1, "exited with status 1: HorovodInternalError: no", "b:0:1")


def test_an_exception_of_one_rank_is_its_death_and_the_others_continue():
    world = running(3, {"a": 1, "b": 1, "c": 1})
    world.fail("b:0:1", "MemoryError: full")
    assert world.kinds(Break)
    assert world.said[-1] == (
        "rank 1, worker b:0:1 exited with status 1: MemoryError: full; host b gets no new ranks, the others continue"
    )
    world.ask("a:0:0", "c:0:2", serial=5)
    assert world.ranks() == ["a:0:0", "c:0:2"]
    assert {seat.num_deaths for worker, seat in world.seats.items() if worker != "b:0:1"} == {1}


def test_when_all_ranks_of_a_round_raise_the_job_ends_with_the_first_error_and_names_the_others():
    world = running(3, {"a": 1, "b": 1, "c": 1}, cooldown_range_s=(0.0, 0.0), hosts_can_change=True)
    # One that has lost another, and says no more, may be the first to end.
    world.end("a:0:0", 1)
    world.fail("c:0:2", "KeyError: 'x'", 3)
    assert world.finish is None
    world.fail("b:0:1", "KeyError: 'y'", 3)
    reason = "exited with status 3: KeyError: 'x'; no rank that had the training's state is left"
    others = (
        "rank 0, worker a:0:0 exited with status 1",
        "rank 1, worker b:0:1 exited with status 3: KeyError: 'y'",
    )
    assert world.finish == Finish(3, reason, "c:0:2", others)
    assert "go on" not in world.said[-1] or world.kinds(Start)


def test_an_error_that_a_program_catches_itself_is_reported_by_the_end_of_its_output():
    world = running(3, {"a": 1, "b": 1, "c": 1}, reset_limit=0)
    world.end("b:0:1", 1, last_line="MemoryError: full")
    said = 'rank 1, worker b:0:1 exited with status 1 (its output ended with "MemoryError: full")'
    assert world.said[-1].startswith(said)
    world.ask("a:0:0", "c:0:2", serial=1)
    assert world.finish.others == (said,)


def test_the_end_of_the_output_is_left_out_where_there_is_another_description():
    world = running(4, {"a": 1, "b": 1, "c": 1, "d": 1})
    world.end("a:0:0", last_line="step 3")
    world.membership.script_failed(ScriptError("b:0:1", "MemoryError: full"), world.now_s)
    world.end("b:0:1", 1, last_line="step 4")
    world.end("c:0:2", 255, trouble="was lost", last_line="step 5")
    world.end("d:0:3", 1, last_line="x" * 1000)
    assert not [text for text in world.said if "step" in text]
    assert len(world.finish.others[-1]) < 300


def test_of_many_that_fail_only_some_are_listed():
    world = running(12, {"a": 12})
    for worker in world.started:
        world.fail(worker)
    assert len(world.finish.others) == 9
    assert world.finish.others[-1] == "and 3 more"


def test_a_rank_that_raises_and_does_not_exit_is_terminated_and_the_others_continue():
    world = running()
    error = ScriptError("b:0:1", "MemoryError: full")
    world.take(world.membership.script_failed(error, world.now_s))
    world.wait(29.0)
    assert not world.last
    world.wait(1.0)
    assert world.kinds(TerminateWorker) == [TerminateWorker("b:0:1")]
    assert world.kinds(Break)
    assert "did not exit in time and is terminated: MemoryError: full; host b gets no new ranks" in world.said[-1]
    world.ask("a:0:0", serial=2)
    assert world.ranks() == ["a:0:0"]


def test_an_error_that_ends_the_job_does_so_although_its_process_does_not_end():
    world = running()
    error = ScriptError("b:0:1", "HorovodInternalError: no", ends_job=True)
    world.take(world.membership.script_failed(error, world.now_s))
    world.wait(30.0)
    reason = "did not exit in time and is terminated: HorovodInternalError: no"
    assert world.finish == Finish(1, reason, "b:0:1")


def test_an_error_after_which_the_rank_requests_a_rank_again_is_discarded():
    world = running()
    error = ScriptError("b:0:1", "HorovodInternalError: no", ends_job=True)
    world.take(world.membership.script_failed(error, world.now_s))
    world.ask("b:0:1", "a:0:0", serial=2)
    world.wait(30.0)
    assert not world.kinds(TerminateWorker)
    world.end("b:0:1", 1)
    assert world.finish is None
    assert "worker b:0:1 exited with status 1; host b gets no new ranks" in world.said[-1]


def test_a_program_that_fails_on_one_host_before_it_joins_does_not_end_the_job():
    world = World(first_num_ranks=2)
    world.hosts(a=1, b=1)
    world.end("a:0:0", 1)
    assert world.finish is None
    world.ask("b:0:1")
    assert world.ranks() == ["b:0:1"], "nobody else can come, and one is enough"
    world = running(hosts_can_change=True)
    world.hosts(a=1, b=1, c=1)
    world.end("c:0:2", 1)
    assert world.finish is None


@pytest.mark.parametrize("cooldown_range_s", [None, (0.0, 0.0)])
def test_a_program_that_fails_everywhere_before_it_joins_ends_the_job_at_once(cooldown_range_s):
    world = World(first_num_ranks=2, hosts_can_change=True, cooldown_range_s=cooldown_range_s)
    world.hosts(a=1, b=1)
    world.end("a:0:0", 2)
    assert world.finish is None
    world.end("b:0:1", 1)
    assert world.finish == Finish(
        2, "exited with status 2; no rank has joined the job", "a:0:0", ("worker b:0:1 exited with status 1",)
    )


def test_a_host_out_of_reach_and_a_program_that_fails_on_another_leave_the_job_waiting_for_hosts():
    world = World(first_num_ranks=2, hosts_can_change=True)
    world.hosts(a=1, b=1)
    world.end("a:0:0", 255)
    world.end("b:0:1", 1)
    assert world.finish is None
    world.hosts(a=1, b=1, c=2)
    world.ask(*world.started[2:])
    assert len(world.ranks()) == 2


def test_a_job_that_gives_up_reports_the_fault_of_the_program_rather_than_a_host_out_of_reach():
    world = World(first_num_ranks=2)
    world.hosts(a=1, b=1)
    world.end("a:0:0", 255)
    world.end("b:0:1", 1)
    assert (world.finish.exit_status, world.finish.worker) == (1, "b:0:1")


def test_a_member_that_was_killed_is_reported_although_the_others_exit_by_themselves_after_it():
    world = running()
    world.end("b:0:1")
    world.end("a:0:0", 1)
    assert (world.finish.exit_status, world.finish.worker) == (128 + 9, "b:0:1")


def test_a_rank_that_fails_again_and_again_as_it_starts_is_given_no_more_time_than_slots_are():
    world = World(first_num_ranks=2, cooldown_range_s=(10.0, 10.0))
    world.hosts(a=1, b=1)
    world.ask("a:0:0")
    for _ in range(11):
        world.end(world.started[-1], 1)
        world.wait(10.0)
        if world.seats:
            break
    assert world.ranks() == ["a:0:0"]


@pytest.mark.parametrize("how", [{"returncode": 255}, {"returncode": 127, "has_started": False}])
def test_a_host_out_of_reach_is_left_out(how):
    world = World(first_num_ranks=1)
    world.hosts(a=1, b=1)
    world.ask("a:0:0")
    world.end("b:0:1", **how)
    assert world.ranks() == ["a:0:0"]


def test_a_member_that_does_not_ask_while_the_others_do_is_ended_and_left_out():
    world = running(3, {"a": 1, "b": 1, "c": 1}, hang_timeout_s=TIMEOUT_S, elastic_timeout_s=1.0)
    world.ask("a:0:0", serial=2)
    world.wait(TIMEOUT_S / 2)
    world.ask("c:0:2", serial=2)
    world.wait(TIMEOUT_S / 2)
    assert world.kinds(TerminateWorker) == [TerminateWorker("b:0:1")]
    assert world.ranks() == ["a:0:0", "c:0:2"]
    world.end("b:0:1")
    assert world.finish is None


def test_members_that_do_not_answer_the_others_are_ended_at_once():
    world = running(3, {"a": 1, "b": 1, "c": 1})
    report = SilentRanks(1, [1])
    world.take(world.membership.ranks_silent(report, world.now_s))
    assert world.kinds(TerminateWorker) == [TerminateWorker("b:0:1")]
    assert world.kinds(Break) == [Break(1, "rank 1, worker b:0:1 does not respond")]
    assert "rank 1, worker b:0:1 gave no sign of life and is terminated; host b gets no new ranks" in world.said[-1]
    world.ask("a:0:0", "c:0:2", serial=5)
    assert world.ranks() == ["a:0:0", "c:0:2"]
    assert world.take(world.membership.ranks_silent(report, world.now_s)) == []  # rank 1 is another one now


def test_a_member_that_is_busy_for_longer_than_a_collective_may_take_stays():
    job = LaunchJob(command=["x"], num_ranks=2, variables={"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"})
    limits = plan_limits(job, ElasticOptions(min_num_ranks=1), {})
    world = running(3, {"a": 1, "b": 1, "c": 1}, hang_timeout_s=limits.hang_timeout_s)
    world.end("c:0:2")
    world.ask("a:0:0", serial=2)
    world.wait(60.0)
    assert not world.kinds(TerminateWorker)
    world.ask("b:0:1", serial=2)
    assert world.ranks() == ["a:0:0", "b:0:1"]


def test_the_time_for_slots_does_not_limit_how_long_a_rank_takes_to_start():
    world = World(first_num_ranks=2, elastic_timeout_s=1.0)
    world.hosts(a=1, b=1)
    world.come("a:0:0", "b:0:1")
    world.wait(60.0)
    assert not world.last
    world.ask("a:0:0")
    world.wait(60.0)
    assert world.last == [PrintMessage("still waiting: worker b:0:1 did not call hvd.init() within 60 s")]
    world.wait(3600.0)
    assert not world.last
    world.ask("b:0:1")
    assert world.ranks() == ["a:0:0", "b:0:1"]


def test_nor_does_it_for_one_that_replaces_another():
    world = running(min_num_ranks=2, elastic_timeout_s=5.0, cooldown_range_s=(1.0, 1.0))
    world.end("b:0:1")
    world.ask("a:0:0", serial=2)
    world.wait(1.0)
    (start,) = world.kinds(Start)
    world.wait(500.0)
    assert world.finish is None
    world.ask(start.worker)
    assert world.ranks() == ["a:0:0", start.worker]


def test_the_start_timeout_ends_one_that_does_not_come_or_keeps_the_others_waiting():
    world = World(first_num_ranks=3, start_timeout_s=TIMEOUT_S)
    world.hosts(a=1, b=1, c=1)
    world.come("a:0:0", "b:0:1")
    world.wait(TIMEOUT_S)
    assert world.kinds(TerminateWorker) == [TerminateWorker("c:0:2")]
    assert "worker c:0:2 did not start in time and is terminated; host c gets no new ranks" in world.said[-1]
    world.ask("a:0:0")
    world.wait(TIMEOUT_S)
    assert world.kinds(TerminateWorker) == [TerminateWorker("b:0:1")]
    assert "worker b:0:1 did not call hvd.init() in time and is terminated" in world.said[-1]
    world.end("c:0:2", -15)
    world.end("b:0:1", -15)
    assert world.ranks() == ["a:0:0"]


def test_ranks_are_started_once_there_are_slots_for_all_and_see_the_place_that_they_will_have():
    world = World(first_num_ranks=3, hosts_can_change=True)
    world.hosts(a=1)
    assert not world.started
    world.hosts(a=1, b=2)
    world.ask("b:0:1", "b:1:2", "a:0:0")
    assert world.predicted == {worker: seat.placement for worker, seat in world.seats.items()}
    world.hosts(a=2, b=2)
    world.ask("a:1:3")
    world.ask("b:0:1", "b:1:2", "a:0:0", serial=4)
    assert world.predicted["a:1:3"] == world.seats["a:1:3"].placement


def test_with_slots_for_the_least_the_job_begins_when_no_more_have_come_in_time():
    world = World(first_num_ranks=3, min_num_ranks=2, hosts_can_change=True)
    world.hosts(a=2)
    assert "2 of the 3 required ranks (-np) are available: waiting for hosts" in world.said[-1]
    world.wait(TIMEOUT_S)
    world.ask(*world.started)
    assert world.ranks() == ["a:0:0", "a:1:1"]
    assert world.predicted == {worker: seat.placement for worker, seat in world.seats.items()}


def test_a_worker_that_must_leave_and_does_not_is_terminated_once():
    world = running(hosts_can_change=True)
    world.hosts(a=1)
    world.ask("a:0:0", "b:0:1", serial=3, wants_sync=False)
    world.wait(30.0)
    assert world.kinds(TerminateWorker) == [TerminateWorker("b:0:1")]
    world.wait(30.0)
    assert not world.kinds(TerminateWorker)


def test_ranks_that_finish_end_the_growth_and_the_rest_may_continue_below_the_minimum():
    world = running(min_num_ranks=2, cooldown_range_s=(0.0, 0.0))
    world.end("a:0:0", 0)
    assert not world.kinds(Start)
    world.ask("b:0:1", serial=9)
    assert world.ranks() == ["b:0:1"]
    assert "the job finishes with 1 of the 2 ranks" in world.said[-1]
    world.end("b:0:1", 0)
    assert world.finish == Finish(0)


def test_status_0_before_the_training_function_has_returned_gives_a_warning():
    world = running(hosts_can_change=True)
    world.end("a:0:0", 0, is_training=True)
    assert "rank 0, worker a:0:0 exited with status 0 before its training function returned" in world.said[-1]
    assert "the others continue without it" in world.said[-1]
    world.ask("b:0:1", serial=9)
    assert world.ranks() == ["b:0:1"]
    world.end("b:0:1", 0, is_training=True)
    assert "before its training function returned" in world.said[-1]
    assert "go on" not in world.said[-1]
    assert world.finish == Finish(0)


def test_a_rank_that_must_leave_or_whose_training_function_returned_gives_no_warning():
    world = running(3, {"a": 1, "b": 1, "c": 1}, min_num_ranks=1, hosts_can_change=True)
    world.hosts(b=1, c=1)
    world.ask("a:0:0", "b:0:1", "c:0:2", serial=1)
    assert world.kinds(DenyRank)
    world.end("a:0:0", 0, is_training=True)
    world.end("b:0:1", 0)
    world.end("c:0:2", 0)
    assert not [text for text in world.said if "warning" in text]


def test_a_death_after_which_no_rank_continues_ends_the_job():
    world = running()
    world.end("b:0:1")
    world.end("a:0:0", 0)
    assert (world.finish.exit_status, world.finish.worker) == (128 + 9, "b:0:1")


def test_newcomers_do_not_keep_a_finished_job_alive():
    world = running(hosts_can_change=True)
    world.hosts(a=1, b=1, c=1, d=1)
    world.ask("c:0:2")
    world.end("a:0:0", 0)
    world.end("b:0:1", 0)
    assert world.finish == Finish(0)


def test_the_reset_limit_ends_the_job_with_status_3():
    world = running(3, {"a": 1, "b": 1, "c": 1}, reset_limit=1)
    world.end("c:0:2")
    world.ask("a:0:0", "b:0:1", serial=2)
    assert world.ranks() == ["a:0:0", "b:0:1"]
    world.end("b:0:1")
    world.ask("a:0:0", serial=2)
    assert world.finish.exit_status == 3
    assert world.finish.others == ("rank 1, worker b:0:1 was killed by SIGKILL",)


def test_at_the_reset_limit_a_job_that_runs_is_not_made_to_grow():
    world = running(reset_limit=0, hosts_can_change=True)
    assert world.hosts(a=1, b=1, c=1) == []


def test_programs_that_never_ask_may_just_end():
    world = World(first_num_ranks=2)
    world.hosts(a=2)
    world.end("a:0:0", 0)
    assert world.finish is None
    world.end("a:1:1", 0)
    assert world.finish == Finish(0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"first_num_ranks": 1, "min_num_ranks": 2}, "--min-num-proc 2, -np 1: expected"),
        ({"first_num_ranks": 3, "max_num_ranks": 2}, "--min-num-proc 1, -np 3, --max-num-proc 2: expected"),
        ({"min_num_ranks": 0}, "--min-num-proc 0, -np 1: expected"),
        ({"reset_limit": -1}, "the reset limit must not be negative"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


class ReplicaWorld(World):
    """Six workers, two of which have a replica of the model together."""

    def __init__(self, *, workers=6, **limits):
        super().__init__(**{"min_num_ranks": 2, "first_num_ranks": 6, **limits})
        self.hosts(a=workers)
        self.ask(*self.started)

    def ask(self, *workers, serial=0, wants_sync=True):
        for worker in workers:
            self.num_asks[worker] = self.num_asks.get(worker, 0) + 1
            ask = RankRequest(worker, self.num_asks[worker], serial, wants_sync, multiple=2)
            self.take(self.membership.rank_requested(ask, self.now_s))
        return self.last


def test_workers_that_complete_no_replica_wait_and_replicas_that_are_whole_stay_together():
    world = ReplicaWorld()
    assert world.ranks() == [f"a:{slot}:{slot}" for slot in range(6)]
    world.end("a:2:2")
    world.ask("a:0:0", "a:1:1", "a:3:3", "a:4:4", "a:5:5", serial=3)
    assert world.ranks() == ["a:0:0", "a:1:1", "a:4:4", "a:5:5"]
    assert world.said[-1] == "4 ranks train, and 1 other waits for more ranks: a replica of the model needs 2"
    assert not any(isinstance(action, DenyRank) for action in world.last)
    # Its end, or the time for which it waits, ends no round.
    world.wait(world.limits.hang_timeout_s + 1)
    assert not any(isinstance(action, TerminateWorker | Break) for action in world.last)
    # Rank 1 is lost: the waiting worker had the same place.
    world.end("a:1:1")
    world.ask("a:0:0", "a:4:4", "a:5:5", serial=5)
    assert world.ranks() == ["a:4:4", "a:5:5", "a:0:0", "a:3:3"]
    assert world.seats["a:3:3"].needs_sync


def test_the_first_round_has_the_least_number_of_ranks_too():
    world = ReplicaWorld(min_num_ranks=5, first_num_ranks=6)
    assert len(world.ranks()) == 6
    world = ReplicaWorld(min_num_ranks=5, first_num_ranks=5, workers=5)
    assert "5 of the 6 required ranks (--min-num-proc) are available" in world.finish.reason


def test_a_waiting_worker_takes_part_when_a_new_one_completes_its_replica():
    world = ReplicaWorld(hosts_can_change=True)
    world.end("a:2:2")
    world.ask("a:0:0", "a:1:1", "a:3:3", "a:4:4", "a:5:5", serial=3)
    world.hosts(a=6, b=1)
    world.come("b:0:6")
    assert any(isinstance(action, Announce) for action in world.ask("b:0:6"))
    world.ask("a:0:0", "a:1:1", "a:4:4", "a:5:5", serial=4, wants_sync=False)
    assert world.ranks() == ["a:0:0", "a:1:1", "a:4:4", "a:5:5", "b:0:6", "a:3:3"]
    # One more completes nothing.
    world.hosts(a=6, b=1, c=1)
    world.come("c:0:7")
    assert not any(isinstance(action, Announce) for action in world.ask("c:0:7"))


def test_the_job_ends_with_its_training_although_a_worker_waits():
    world = ReplicaWorld()
    world.end("a:5:5")
    world.ask(*(f"a:{slot}:{slot}" for slot in range(5)), serial=3)
    for worker in world.ranks():
        world.end(worker, 0)
    assert world.finish == Finish(0)


def test_fewer_ranks_than_a_replica_has_end_the_job_with_what_is_missing():
    world = ReplicaWorld(min_num_ranks=1, first_num_ranks=6)
    for slot in range(1, 6):
        world.end(f"a:{slot}:{slot}")
    world.ask("a:0:0", serial=3)
    assert "1 of the 2 required ranks (--min-num-proc) are available, and a replica of the model needs 2" in (
        world.finish.reason
    )

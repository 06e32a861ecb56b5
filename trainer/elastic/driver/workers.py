"""The workers of an elastic job, with their phases, states and deadlines, and their deaths, for `membership`.

A death is the unexpected end of a worker. The termination of a worker that missed a deadline also counts, unless the
worker had to exit anyway. This module does no I/O.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from datasvc.trainer.elastic.driver.actions import Finish
from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.launch.ranks.job import describe_end, exit_status_of
from datasvc.trainer.rendezvous.messages import RankRequest, ScriptError

# A worker that must exit has this time; then the driver terminates it.
_LEAVE_TIME_S = 30.0
# Without a start timeout, a note is printed after this time, and the worker is not terminated.
NOTE_TIME_S = 60.0


# The exit status of ssh if it cannot reach the host.
_UNREACHABLE_STATUS = 255
# Limits on the report of the launcher: deaths listed besides the cause, and the length of a line of output.
_MAX_OTHERS = 8
_MAX_LINE_CHARACTERS = 200


class Phase(enum.Enum):
    """The phases of a worker."""

    STARTING = "its process is being started or runs, but has not requested a rank yet"
    WAITING = "it waits for its rank in the next round"
    MEMBER = "it is a member of the current round"
    LEAVING = "it must exit"


@dataclass
class Worker:
    """One process of the job, from its start to its end.

    Attributes:
        name: name of the form `host:slot:seniority`.
        seniority: number of workers of the job that were started before it.
        since_s: time when it entered its phase.
        old_rank: rank in the last round that it was a member of; None before its first round.
        request: its last request for a rank.
        started_s: time when its command began to run; None before that.
        is_noted: whether a note about its delay was printed; there is one note per worker.
        slot_lost_s: time when its slot was removed; None while it has one.
        failing_since_s: time when it reported that it exits with an error; None before that.
        is_stopped: whether `membership` has returned the action to terminate its process.
        is_spare: whether a round has begun without it, because the number of ranks must be a multiple; it waits.
    """

    name: str
    host: str
    slot: int
    seniority: int
    since_s: float
    phase: Phase = Phase.STARTING
    old_rank: int | None = None
    request: RankRequest | None = None
    started_s: float | None = None
    is_noted: bool = False
    slot_lost_s: float | None = None
    failing_since_s: float | None = None
    is_stopped: bool = False
    is_spare: bool = False

    @property
    def has_lost_slot(self) -> bool:
        """Whether its slot was removed."""
        return self.slot_lost_s is not None

    @property
    def may_have_state(self) -> bool:
        """Whether it has been a member of a round, and so may have the state of the job."""
        return self.old_rank is not None

    @property
    def serial(self) -> int:
        """Serial number of its committed state; 0 for none. Equal serials mean equal states."""
        return 0 if self.request is None else self.request.serial

    def precedence(self) -> tuple[float, int]:
        """Return a sort key: ranks of the last round in their order, then others in the order of their starts."""
        return math.inf if self.old_rank is None or self.is_spare else self.old_rank, self.seniority

    def stop(self, now_s: float) -> None:
        """Enter the phase `LEAVING`, and record that the process is terminated. The caller returns the action."""
        self.enter(Phase.LEAVING, now_s)
        self.is_stopped = True

    def enter(self, phase: Phase, now_s: float) -> None:
        """Enter a phase."""
        self.phase, self.since_s = phase, now_s

    def describe(self) -> str:
        """Return its rank, if it has one, and its name, for messages."""
        rank = "" if self.old_rank is None else f"rank {self.old_rank}, "
        return f"{rank}worker {self.name}"


@dataclass(frozen=True)
class Deadline:
    """A time by which a worker must have done something.

    Attributes:
        duty: what the worker must do, as text that follows "did not", such as "start".
        is_binding: whether the driver terminates a worker that misses the deadline; otherwise it only prints a note.
    """

    at_s: float
    worker: Worker
    duty: str
    is_binding: bool = True


@dataclass
class Workers:
    """The workers whose processes have not ended, by name, oldest first.

    `num_started` also counts those that have ended.
    """

    by_name: dict[str, Worker] = field(default_factory=dict)
    num_started: int = 0

    def start(self, host: str, now_s: float) -> Worker:
        """Add a worker on the first free slot of the host."""
        taken = {worker.slot for worker in self.by_name.values() if worker.host == host}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        worker = Worker(f"{host}:{slot}:{self.num_started}", host, slot, self.num_started, now_s)
        self.num_started += 1
        self.by_name[worker.name] = worker
        return worker

    def staying(self) -> list[Worker]:
        """Return the workers that need not exit, including those that have lost their slots, oldest first."""
        return [worker for worker in self.by_name.values() if worker.phase is not Phase.LEAVING]

    def with_slot(self) -> list[Worker]:
        """Return the workers that have a slot and need not exit."""
        return [worker for worker in self.staying() if not worker.has_lost_slot]

    def in_phase(self, phase: Phase) -> list[Worker]:
        """Return the workers in a phase, oldest first."""
        return [worker for worker in self.by_name.values() if worker.phase is phase]

    def deadlines(self, *, start_timeout_s: float | None, hang_timeout_s: float) -> list[Deadline]:
        """Return the deadlines of all workers. The arguments are limits of the job; see `Limits`."""
        waiting = self.in_phase(Phase.WAITING)
        deadlines = self._start_deadlines(start_timeout_s, [worker.since_s for worker in waiting])
        # The round ends for all members when the first of them requests a new rank. Until then, this list is empty.
        was_member = [worker for worker in waiting if worker.may_have_state and not worker.is_spare]
        round_end_s = sorted(worker.since_s for worker in was_member)[:1]
        for worker in self.in_phase(Phase.MEMBER):
            # For a member that has lost its slot, the round ends at that time too.
            ends_s = round_end_s if worker.slot_lost_s is None else [*round_end_s, worker.slot_lost_s]
            if ends_s:
                # Count from the beginning of the round if the slot was lost earlier.
                at_s = max(min(ends_s), worker.since_s) + hang_timeout_s
                deadlines.append(Deadline(at_s, worker, "request a rank"))
        for worker in self.by_name.values():
            # A worker must exit after the driver has denied it a rank, and after it has reported an error.
            since_s = worker.since_s if worker.phase is Phase.LEAVING else worker.failing_since_s
            if since_s is not None and not worker.is_stopped:
                deadlines.append(Deadline(since_s + _LEAVE_TIME_S, worker, "exit"))
        return deadlines

    def _start_deadlines(self, timeout_s: float | None, requests_s: list[float]) -> list[Deadline]:
        """Return the deadlines of workers that have not joined yet; `requests_s`: times of the requests for ranks."""
        deadlines = []
        limit_s = NOTE_TIME_S if timeout_s is None else timeout_s
        for worker in self.in_phase(Phase.STARTING):
            if timeout_s is None and worker.is_noted:
                continue  # the note is printed once
            if worker.started_s is None:
                deadlines.append(Deadline(worker.since_s + limit_s, worker, "start", timeout_s is not None))
            elif requests_s and not self.in_phase(Phase.MEMBER):
                # A program may never call init(), so there is no deadline until another worker waits for this one.
                at_s = max(worker.started_s, min(requests_s)) + limit_s
                deadlines.append(Deadline(at_s, worker, "call hvd.init()", timeout_s is not None))
        return deadlines


# A worker is a process of the job. A round is a period with a fixed assignment of ranks to workers.


def order_workers(workers: Sequence[Worker], multiple: int = 1) -> list[Worker]:
    """Return workers in rank order: the first ones are the ranks of a round, if not all are.

    The worker with the newest state comes first. The others copy the state of rank 0, so no committed work is lost.
    Workers with equal states keep the order of their old ranks, and new workers come last.

    With a `multiple` above 1, so many consecutive ranks have one replica of a model together, each a part of it, and
    the program finds the newest state of each part. Replicas of which all ranks are left come first. Other workers
    keep their places inside a replica if they can, so that few parts are copied.
    """
    # `serial` is the number of the worker's committed state: the highest one is the newest state.
    ordered = sorted(workers, key=lambda worker: (-worker.serial, *worker.precedence()))
    if multiple == 1:
        return ordered
    replicas: dict[int, list[Worker]] = {}
    for worker in ordered:
        if worker.old_rank is not None and not worker.is_spare:
            replicas.setdefault(worker.old_rank // multiple, []).append(worker)
    whole = [
        sorted(members, key=Worker.precedence)
        for _, members in sorted(replicas.items(), key=lambda item: (-item[1][0].serial, item[0]))
        if len(members) == multiple
    ]
    kept = [worker for members in whole for worker in members]
    rest = [worker for worker in ordered if worker not in kept]
    while len(rest) >= multiple:
        places = [_take(rest, place, multiple) for place in range(multiple)]
        kept += [rest.pop(0) if worker is None else worker for worker in places]
    return [*kept, *rest]


def _take(rest: list[Worker], place: int, multiple: int) -> Worker | None:
    """Remove the first worker that had this place in a replica, and return it; None: there is none."""
    for worker in rest:
        if worker.old_rank is not None and worker.old_rank % multiple == place:
            rest.remove(worker)
            return worker
    return None


def plan_placements(ordered: Sequence[Worker]) -> dict[str, RankPlacement]:
    """Return the placement of every worker by its name, from the workers in rank order.

    The local rank depends on the slot and not on the rank, because programs choose their GPU by the local rank, often
    before the first round.
    """
    slots_on: dict[str, list[int]] = {}
    for worker in ordered:
        slots_on.setdefault(worker.host, []).append(worker.slot)
    local_ranks = {host: _plan_local_ranks(slots) for host, slots in slots_on.items()}
    placements = {}
    for rank, worker in enumerate(ordered):
        local_rank_of_slot = local_ranks[worker.host]
        local_rank = local_rank_of_slot[worker.slot]
        # As in Horovod, the cross size counts only the hosts that have this local rank.
        hosts = [host for host, slots in slots_on.items() if len(slots) > local_rank]
        placements[worker.name] = RankPlacement(
            rank=rank,
            size=len(ordered),
            local_rank=local_rank,
            local_size=len(local_rank_of_slot),
            cross_rank=hosts.index(worker.host),
            cross_size=len(hosts),
        )
    return placements


def _plan_local_ranks(slots: Sequence[int]) -> dict[int, int]:
    # A slot whose number is below the number of slots in use gets this number. The others get the numbers left.
    unused = sorted(set(range(len(slots))) - set(slots))
    return {slot: slot if slot < len(slots) else unused.pop(0) for slot in sorted(slots)}


# A death is the unexpected end of a worker. The termination of a worker that missed a deadline also counts, unless
# the worker had to exit anyway. A round is a period with a fixed assignment of ranks to workers. This module does no
# I/O.


@dataclass(frozen=True)
class Death:
    """The unexpected end of a worker, also its termination after a missed deadline.

    Attributes:
        returncode: return code of its process; negative for a signal.
        trouble: cause, as text that follows the worker's name; None if `returncode` is the only description.
        has_started: whether its command has run. Also False if the worker missed a deadline and is terminated.
        last_line: last line of its output that is not blank; empty if there is none.
    """

    worker: Worker
    returncode: int
    trouble: str | None = None
    has_started: bool = True
    last_line: str = ""

    @property
    def is_program_error(self) -> bool:
        """Whether the program itself failed, not by a signal or by ssh, so that it may fail on every host."""
        return self.has_started and self.trouble is None and 0 < self.returncode != _UNREACHABLE_STATUS


@dataclass
class Deaths:
    """The deaths of a job, and the errors that programs have reported.

    Attributes:
        since_round: deaths since the last round began, without those with status 0.
        errors: last error that each worker has reported, by the name of the worker.
    """

    num_all: int = 0
    since_round: list[Death] = field(default_factory=list)
    errors: dict[str, ScriptError] = field(default_factory=dict)

    def add(self, death: Death) -> None:
        """Record a death. A death with status 0 is counted, but is not reported as a failure."""
        self.num_all += 1
        if death.returncode:
            self.since_round.append(death)

    def ends_job(self, worker: str) -> bool:
        """Return whether the worker has reported an error that would occur in a new round too."""
        return worker in self.errors and self.errors[worker].ends_job

    def describe(self, death: Death) -> str:
        """Describe a death by a text that follows the worker's name, such as "exited with status 1"."""
        text = death.trouble or describe_end(death.returncode)
        error = self.errors.get(death.worker.name)
        if error is not None:
            return f"{text}: {error.text}"
        # A program that catches its own exception usually prints it last.
        if death.is_program_error and death.last_line:
            return f'{text} (its output ended with "{death.last_line[:_MAX_LINE_CHARACTERS]}")'
        return text

    def choose_cause(self) -> Death | None:
        """Return the most likely cause of the deaths since the last round began; None if there are none."""
        with_error = [death for death in self.since_round if death.worker.name in self.errors]
        # The loss of one member makes the programs of the other members fail. If members died, an error of a program
        # may therefore be a consequence, and does not come before other deaths.
        have_members_died = any(death.worker.may_have_state for death in self.since_round)
        program_errors = [death for death in self.since_round if death.is_program_error and not have_members_died]
        candidates = [*with_error, *program_errors, *self.since_round]
        return candidates[0] if candidates else None

    def finish(self, cause: Death, why: str = "") -> Finish:
        """Return the action that ends the job because of a death. `why` follows the description of the death."""
        status = exit_status_of(cause.returncode)
        return Finish(status, self.describe(cause) + why, cause.worker.name, self.list_others(cause))

    def list_others(self, cause: Death | None = None) -> tuple[str, ...]:
        """Return one line for each death since the last round began, except `cause`."""
        others = [
            f"{death.worker.describe()} {self.describe(death)}" for death in self.since_round if death is not cause
        ]
        if len(others) > _MAX_OTHERS:
            others[_MAX_OTHERS:] = [f"and {len(others) - _MAX_OTHERS} more"]
        return tuple(others)

    def cover_slots(self, slots: set[tuple[str, int]]) -> bool:
        """Return whether the program failed in each of these slots (host, slot), and no death has another cause."""
        # After another kind of death, such as an unreachable host, a new worker may succeed.
        failed = {(death.worker.host, death.worker.slot) for death in self.since_round}
        return bool(failed) and slots <= failed and all(death.is_program_error for death in self.since_round)

"""What is known of the workers of an elastic job."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from datasvc.trainer.elastic.driver.rank_assignment import RankCandidate
from datasvc.trainer.rendezvous.messages import Ask

_LEAVE_TIME_S = 30.0
# After which it is said which worker keeps the others waiting, where no limit is set.
NOTE_TIME_S = 60.0


class Phase(enum.Enum):
    """Where a worker stands."""

    STARTING = "its process is being started or runs, it has not asked for a place yet"
    ASKING = "it waits for a place in the next round"
    MEMBER = "it is in the newest round"
    LEAVING = "it was told to end"


@dataclass
class Worker:
    """One process of the job, from its start to its end.

    Args:
        name: `host:slot:incarnation`.
        host: where it runs.
        slot: one of the host's, from 0.
        seniority: how many were started before it.
        since_s: when it came into its phase.
        phase: where it stands.
        old_rank: in the newest round in which it was; None before it has been in one.
        ask: its newest.
        come_s: when its command began to run; None before.
        is_noted: whether it was said that it keeps others waiting.
        unwanted_since_s: when its slot went away; None while there is one.
        failing_since_s: when it said that it ends with an error; None before.
        is_stopped: whether its process is being ended from outside.
    """

    name: str
    host: str
    slot: int
    seniority: int
    since_s: float
    phase: Phase = Phase.STARTING
    old_rank: int | None = None
    ask: Ask | None = None
    come_s: float | None = None
    is_noted: bool = False
    unwanted_since_s: float | None = None
    failing_since_s: float | None = None
    is_stopped: bool = False

    @property
    def is_unwanted(self) -> bool:
        """Whether there is no slot for it any more."""
        return self.unwanted_since_s is not None

    @property
    def may_have_state(self) -> bool:
        """Whether it has been in a round."""
        return self.old_rank is not None

    def precedence(self) -> tuple[float, int]:
        """The greater, the sooner it is let go: newcomers first, then high ranks."""
        return math.inf if self.old_rank is None else self.old_rank, self.seniority

    def candidate(self) -> RankCandidate:
        """What counts for its place in the next round."""
        return RankCandidate(
            worker=self.name,
            host=self.host,
            slot=self.slot,
            serial=0 if self.ask is None else self.ask.serial,
            old_rank=self.old_rank,
            seniority=self.seniority,
        )

    def stop(self, now_s: float) -> None:
        """Its process is to be ended from outside."""
        self.enter(Phase.LEAVING, now_s)
        self.is_stopped = True

    def enter(self, phase: Phase, now_s: float) -> None:
        """Changes its phase."""
        self.phase, self.since_s = phase, now_s

    def describe(self) -> str:
        """For people: its rank, if it has one, and its name."""
        rank = "" if self.old_rank is None else f"rank {self.old_rank}, "
        return f"{rank}worker {self.name}"


@dataclass(frozen=True)
class Deadline:
    """By when a worker must have done its duty."""

    at_s: float
    worker: Worker
    duty: str
    is_binding: bool = True


@dataclass
class Workers:
    """All processes that have not ended yet."""

    by_name: dict[str, Worker] = field(default_factory=dict)
    num_started: int = 0

    def start(self, host: str, now_s: float) -> Worker:
        """Adds one on the host's first free slot."""
        taken = {worker.slot for worker in self.by_name.values() if worker.host == host}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        worker = Worker(f"{host}:{slot}:{self.num_started}", host, slot, self.num_started, now_s)
        self.num_started += 1
        self.by_name[worker.name] = worker
        return worker

    def staying(self) -> list[Worker]:
        """Those that were not told to end, oldest first."""
        return [worker for worker in self.by_name.values() if worker.phase is not Phase.LEAVING]

    def wanted(self) -> list[Worker]:
        """Those that will have a place in the next round if they live."""
        return [worker for worker in self.staying() if not worker.is_unwanted]

    def in_phase(self, phase: Phase) -> list[Worker]:
        """Those that stand there, oldest first."""
        return [worker for worker in self.by_name.values() if worker.phase is phase]

    def deadlines(self, *, start_timeout_s: float | None, hang_timeout_s: float) -> list[Deadline]:
        """By when workers must have done something.

        Args:
            start_timeout_s: for a process to come, and for one to ask while others wait for it; None for no limit:
                the deadlines are then for a note alone.
            hang_timeout_s: for a member to ask for the next round, once its round is over.
        """
        asking = self.in_phase(Phase.ASKING)
        deadlines = self._start_deadlines(start_timeout_s, [worker.since_s for worker in asking])
        asks_s = sorted(worker.since_s for worker in asking if worker.may_have_state)
        for worker in self.in_phase(Phase.MEMBER):
            # Once a member asks, its round is over for all.
            since_s = asks_s[:1] if worker.unwanted_since_s is None else [*asks_s[:1], worker.unwanted_since_s]
            if since_s:
                at_s = max(min(since_s), worker.since_s) + hang_timeout_s
                deadlines.append(Deadline(at_s, worker, "ask for a place"))
        for worker in self.by_name.values():
            since = worker.since_s if worker.phase is Phase.LEAVING else worker.failing_since_s
            if since is not None and not worker.is_stopped:
                deadlines.append(Deadline(since + _LEAVE_TIME_S, worker, "end"))
        return deadlines

    def _start_deadlines(self, timeout_s: float | None, asks_s: list[float]) -> list[Deadline]:
        deadlines = []
        limit_s = NOTE_TIME_S if timeout_s is None else timeout_s
        for worker in self.in_phase(Phase.STARTING):
            if timeout_s is None and worker.is_noted:
                continue
            if worker.come_s is None:
                deadlines.append(Deadline(worker.since_s + limit_s, worker, "start", timeout_s is not None))
            elif asks_s and not self.in_phase(Phase.MEMBER):
                # A program need not ask, and may take its time until others wait for it.
                at_s = max(worker.come_s, min(asks_s)) + limit_s
                deadlines.append(Deadline(at_s, worker, "call hvd.init()", timeout_s is not None))
        return deadlines

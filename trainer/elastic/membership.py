"""Who is in an elastic job: decides what follows from hosts, asks, deaths and time. No I/O, no clock.

Invariants:
    A round has each of its ranks once, and its members are alive when it is made.
    Its rank 0 has the newest state that any living worker has committed; if none has the job's state, the job
    ends, rather than begin anew unnoticed.
    No new worker on a barred host. No round of fewer than the minimum, but when the job runs down: that is said.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.elastic.actions import Action, Announce, Break, Dismiss, Finish, Say, Seated, Start, Stop
from trainer.elastic.blacklist import Blacklist
from trainer.elastic.limits import Limits
from trainer.elastic.messages import Ask, Notice, Seat
from trainer.elastic.places import plan_places
from trainer.elastic.workers import Phase, Worker, Workers
from trainer.launch.job import Host, describe_end

RESET_LIMIT_STATUS = 3
_UNREACHABLE_STATUS = 255
_REMOVED, _ADDED = 1, 2


@dataclass(frozen=True)
class _Failure:
    worker: str
    returncode: int
    trouble: str | None = None

    def describe(self) -> str:
        """What happened, in words that follow its name."""
        return self.trouble or describe_end(self.returncode)

    def finish(self, why: str = "") -> Finish:
        """The end of the job because of it."""
        status = self.returncode if self.returncode > 0 else 128 - self.returncode
        return Finish(status, self.describe() + why, self.worker)


class Membership:
    """The state of a job. Each method takes an event and returns what to do, in order.

    Nothing is to be done after a ``Finish``; events are then ignored.

    Args:
        limits: see there.
        now_s: seconds of a clock that does not go back, as in every method.
    """

    def __init__(self, limits: Limits, *, now_s: float) -> None:
        self._limits = limits
        self._blacklist = Blacklist(limits.cooldown_range_s)
        self._hosts: tuple[Host, ...] = ()
        self._workers = Workers()
        self._round = 0
        self._has_state = False
        self._runs_down = False
        self._failures: list[_Failure] = []
        self._script_errors: dict[str, str] = {}
        self._notice = Notice()
        self._noticed: set[str] = set()
        self._short_since_s: float | None = now_s
        self._said: str | None = None
        self._is_over = False

    def hosts_found(self, hosts: Sequence[Host], now_s: float) -> list[Action]:
        """These are all hosts that there are now; one that is named twice has the slots of both."""
        slots: dict[str, int] = {}
        for host in hosts:
            slots[host.name] = slots.get(host.name, 0) + host.num_slots
        self._hosts = tuple(Host(name, num_slots) for name, num_slots in slots.items())
        return self._advance(now_s)

    def worker_asked(self, ask: Ask, now_s: float) -> list[Action]:
        """A worker wants a place in the next round."""
        worker = self._workers.by_name.get(ask.worker)
        if worker is None or worker.phase is Phase.LEAVING:
            return []
        worker.ask = ask
        worker.enter(Phase.ASKING, now_s)
        self._has_state = self._has_state or ask.serial > 0
        return self._advance(now_s)

    def script_failed(self, worker: str, text: str) -> list[Action]:
        """The program of a worker says that it cannot go on; its end will follow."""
        self._script_errors[worker] = text
        return []

    def worker_ended(
        self, name: str, returncode: int, now_s: float, *, has_started: bool = True, trouble: str | None = None
    ) -> list[Action]:
        """A process is gone; negative return codes are signals.

        ``has_started`` is False if the command never ran because its host was out of reach. ``trouble`` is what
        happened, in words that follow the worker's name, where the return code does not say so.
        """
        worker = self._workers.by_name.pop(name, None)
        if worker is None or self._is_over:
            return []
        actions: list[Action] = []
        if worker.phase is not Phase.LEAVING and worker.may_have_state:
            actions.append(Break(self._round, f"{worker.describe()} is gone"))
        if worker.phase is not Phase.LEAVING:
            if returncode == 0 and (worker.may_have_state or not self._round):
                self._runs_down = True
            else:
                failure = _Failure(worker.name, returncode, trouble)
                actions += self._fail(worker, failure, now_s, has_started=has_started)
        return self._finishing([*actions, *self._advance(now_s)])

    def time_passed(self, now_s: float) -> list[Action]:
        """Nothing has happened, but it is ``next_deadline_s``."""
        return self._advance(now_s)

    def next_deadline_s(self, now_s: float) -> float | None:
        """When ``time_passed`` is due, if nothing else happens."""
        times = [deadline_s for deadline_s, _, _ in self._workers.deadlines(self._limits.elastic_timeout_s)]
        if self._short_since_s is not None:
            times.append(self._short_since_s + self._limits.elastic_timeout_s)
        release_s = self._blacklist.next_release_s(now_s)
        return min([*times, *([] if release_s is None else [release_s])], default=None)

    def _fail(self, worker: Worker, failure: _Failure, now_s: float, *, has_started: bool) -> list[Action]:
        if worker.name in self._script_errors:
            return [failure.finish(f": {self._script_errors[worker.name]}")]
        is_programs_fault = has_started and 0 < failure.returncode != _UNREACHABLE_STATUS
        if worker.phase is Phase.STARTING and is_programs_fault and self._round == 0:
            return [failure.finish(" before it had joined the job")]
        if failure.returncode:
            self._failures.append(failure)
        until_s = self._blacklist.bar(worker.host, now_s)
        how_long = "" if until_s == math.inf else f" for {until_s - now_s:g} s"
        return [
            Say(
                f"{worker.describe()} {failure.describe()}; "
                f"host {worker.host} gets no new ranks{how_long}, the others go on"
            )
        ]

    def _advance(self, now_s: float) -> list[Action]:
        if self._is_over:
            return []
        actions = [*self._retire(now_s), *self._recruit(now_s), *self._end_late(now_s)]
        actions += self._seat(now_s)
        return self._finishing([*actions, *self._announce(), *self._conclude()])

    def _finishing(self, actions: list[Action]) -> list[Action]:
        """The actions up to the first that ends the job."""
        for index, action in enumerate(actions):
            if isinstance(action, Finish):
                self._is_over = True
                return actions[: index + 1]
        return actions

    def _retire(self, now_s: float) -> list[Action]:
        """Lets go of workers whose slot is gone, the youngest first."""
        slots = {host.name: host.num_slots for host in self._hosts}
        actions: list[Action] = []
        by_host: dict[str, int] = {}
        for worker in sorted(self._workers.staying(), key=Worker.precedence):
            by_host[worker.host] = by_host.get(worker.host, 0) + 1
            if by_host[worker.host] <= slots.get(worker.host, 0):
                worker.unwanted_since_s = None
            elif not worker.is_unwanted:
                worker.unwanted_since_s = now_s
            if worker.is_unwanted and worker.phase is Phase.STARTING:
                worker.stop(now_s)
                actions.append(Stop(worker.name))
        return actions

    def _recruit(self, now_s: float) -> list[Action]:
        is_last_round = bool(self._round) and self._resets_left() <= 0
        if self._runs_down or (is_last_round and len(self._workers.wanted()) >= self._limits.min_num_ranks):
            return []
        actions: list[Action] = []
        for host in self._hosts:
            for _ in range(self._num_free(host, now_s)):
                if len(self._workers.wanted()) >= (self._limits.max_num_ranks or math.inf):
                    return actions
                actions.append(Start(self._workers.start(host.name, now_s).name, host.name))
        return actions

    def _num_free(self, host: Host, now_s: float) -> int:
        if self._blacklist.bars(host.name, now_s):
            return 0
        # A slot is free when its process is gone: a GPU takes no second one before.
        num_taken = sum(worker.host == host.name for worker in self._workers.by_name.values())
        return max(0, host.num_slots - num_taken)

    def _end_late(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for deadline_s, worker, duty in self._workers.deadlines(self._limits.elastic_timeout_s):
            if deadline_s > now_s:
                continue
            was_member = worker.phase is Phase.MEMBER
            if worker.phase is not Phase.LEAVING:
                self._blacklist.bar(worker.host, now_s)
            worker.stop(now_s)
            actions += [Say(f"{worker.describe()} did not {duty} in time and is ended"), Stop(worker.name)]
            if was_member:
                actions.append(Break(self._round, f"{worker.describe()} hangs"))
        return actions

    def _announce(self) -> list[Action]:
        members = self._workers.in_phase(Phase.MEMBER)
        if self._runs_down or not members:
            return []
        added = {w.name for w in self._workers.in_phase(Phase.ASKING) if w.old_rank is None and not w.is_unwanted}
        removed = {worker.name for worker in members if worker.is_unwanted}
        if added | removed <= self._noticed:
            return []
        self._noticed |= added | removed
        result = (_REMOVED if removed else 0) | (_ADDED if added else 0)
        self._notice = Notice(self._notice.number + 1, result)
        return [Announce(self._notice)]

    def _seat(self, now_s: float) -> list[Action]:
        """Makes the next round, if everyone who must be in it waits for it."""
        asking = self._workers.in_phase(Phase.ASKING)
        if self._workers.in_phase(Phase.MEMBER):
            self._short_since_s = None
            return []
        chosen = [worker for worker in asking if not worker.is_unwanted]
        if self._has_state and not any(worker.ask and worker.ask.serial for worker in chosen):
            # All slots have moved: the old ranks come once more, to hand the state over.
            chosen = [worker for worker in asking if not worker.is_unwanted or worker.may_have_state]
        if self._round and chosen and not any(worker.may_have_state for worker in chosen):
            return []
        if not self._is_enough(chosen, now_s):
            return self._wait(chosen, now_s)
        if self._has_state and not any(worker.ask and worker.ask.serial for worker in chosen):
            return [self._give_up("no rank that had the training's state is left")]
        if self._round and self._resets_left() <= 0:
            return [Finish(RESET_LIMIT_STATUS, f"the reset limit of {self._limits.reset_limit} is reached")]
        dismissed: list[Action] = [self._dismiss(worker, now_s) for worker in asking if worker not in chosen]
        return [*dismissed, *self._begin_round(chosen, now_s)]

    def _is_enough(self, chosen: Sequence[Worker], now_s: float) -> bool:
        if not chosen:
            return False
        if self._round == 0 and not self._has_waited_too_long(now_s):
            if self._workers.in_phase(Phase.STARTING):
                return False
            return self._runs_down or len(chosen) >= self._limits.first_num_ranks
        if self._runs_down:
            return True
        return len(chosen) >= self._limits.min_num_ranks

    def _has_waited_too_long(self, now_s: float) -> bool:
        return self._short_since_s is not None and self._short_since_s + self._limits.elastic_timeout_s <= now_s

    def _wait(self, chosen: Sequence[Worker], now_s: float) -> list[Action]:
        """Waits for more ranks, says so, and gives up when that is in vain."""
        if self._runs_down:
            self._short_since_s = None
            return []
        if self._short_since_s is None:
            self._short_since_s = now_s
        needed, flag = self._limits.first_num_ranks, "-np"
        if self._round:
            needed, flag = self._limits.min_num_ranks, "--min-num-proc"
        text = f"{len(chosen)} of the {needed} ranks that are needed ({flag}) are there"
        if self._has_waited_too_long(now_s):
            return [self._give_up(f"{text}: no more came in {self._limits.elastic_timeout_s:g} s")]
        if not self._can_grow(now_s):
            return [self._give_up(f"{text}, and there is no host for more")]
        if self._workers.in_phase(Phase.STARTING) or text == self._said:
            return []
        self._said = text
        return [Say(f"{text}: waiting for hosts, {self._limits.elastic_timeout_s:g} s at most")]

    def _can_grow(self, now_s: float) -> bool:
        return (
            self._limits.hosts_can_change
            or len(self._workers.by_name) > len(self._workers.in_phase(Phase.ASKING))
            or self._blacklist.next_release_s(now_s) is not None
        )

    def _give_up(self, reason: str) -> Finish:
        if self._failures:
            return self._failures[0].finish(f"; {reason}" if reason else "")
        return Finish(1, reason)

    def _dismiss(self, worker: Worker, now_s: float) -> Dismiss:
        assert worker.ask is not None
        worker.enter(Phase.LEAVING, now_s)
        return Dismiss(worker.name, worker.ask.number, f"its slot on {worker.host} is gone")

    def _begin_round(self, chosen: Sequence[Worker], now_s: float) -> list[Action]:
        self._round += 1
        asks = {worker.name: worker.ask for worker in chosen if worker.ask is not None}
        serials = {ask.serial for ask in asks.values()}
        needs_sync = len(serials) > 1 or 0 in serials or any(ask.wants_sync for ask in asks.values())
        actions: list[Action] = []
        if len(chosen) < self._limits.min_num_ranks:
            few = f"{len(chosen)} of the {self._limits.min_num_ranks} ranks of --min-num-proc"
            actions.append(Say(f"the job runs down with {few}"))
        for name, place in plan_places([worker.candidate() for worker in chosen]).items():
            worker = self._workers.by_name[name]
            worker.old_rank = place.rank
            worker.enter(Phase.MEMBER, now_s)
            seat = Seat(self._round, place, needs_sync, self._notice.number)
            actions.append(Seated(name, asks[name].number, seat))
        self._failures, self._noticed, self._short_since_s, self._said = [], set(), None, None
        return actions

    def _resets_left(self) -> float:
        limit = self._limits.reset_limit
        return math.inf if limit is None else limit - (self._round - 1)

    def _conclude(self) -> list[Action]:
        """The end, when no worker is left that could bring the job to one."""
        staying = self._workers.staying()
        if self._round and any(worker.may_have_state for worker in staying):
            return []
        if not self._round and (staying or not self._runs_down):
            return []
        if self._failures:
            return [self._give_up("no rank that had the training's state is left" if self._round else "")]
        return [Finish(0)]

"""Who is in an elastic job: decides what follows from hosts, asks, deaths and time. No I/O, no clock.

Invariants:
    A round has each of its ranks once, and its members are alive when it is made.
    Its rank 0 has the newest state that any living worker has committed; if none has the job's state, the job
    ends, rather than begin anew unnoticed.
    No new worker on a barred host. No round of fewer than the minimum, but when the job runs down: that is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from datasvc.trainer.elastic.driver.actions import (
    Action,
    Announce,
    Break,
    Finish,
    Say,
    Seated,
    Start,
    Stop,
    StopWorker,
)
from datasvc.trainer.elastic.driver.blacklist import Blacklist
from datasvc.trainer.elastic.driver.deaths import Death, Deaths
from datasvc.trainer.elastic.driver.limits import Limits
from datasvc.trainer.elastic.driver.rank_assignment import plan_places
from datasvc.trainer.elastic.driver.workers import NOTE_TIME_S, Deadline, Phase, Worker, Workers
from datasvc.trainer.launch.ranks.job import Host
from datasvc.trainer.rendezvous.messages import Ask, Notice, RankAssignment, ScriptError

RESET_LIMIT_STATUS = 3
_REMOVED, _ADDED = 1, 2


class JobMembership:
    """The state of a job. Each method takes an event and returns what to do, in order.

    Nothing is to be done after a `Finish`; events are then ignored.

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
        self._deaths = Deaths()
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
        # It goes on after all: its error was caught.
        self._deaths.errors.pop(ask.worker, None)
        worker.failing_since_s = None
        worker.ask = ask
        worker.enter(Phase.ASKING, now_s)
        self._has_state = self._has_state or ask.serial > 0
        return self._advance(now_s)

    def worker_came(self, name: str, now_s: float) -> list[Action]:
        """The command of a worker runs."""
        worker = self._workers.by_name.get(name)
        if worker is not None:
            worker.come_s = now_s
        return self._advance(now_s)

    def script_failed(self, error: ScriptError, now_s: float) -> list[Action]:
        """The program of a worker says that it ends with an error; its end will follow, or is made to."""
        self._deaths.errors[error.worker] = error
        worker = self._workers.by_name.get(error.worker)
        if worker is not None:
            worker.failing_since_s = now_s
        return self._advance(now_s)

    def worker_ended(
        self,
        name: str,
        returncode: int,
        now_s: float,
        *,
        has_started: bool = True,
        trouble: str | None = None,
        last_line: str = "",
        is_training: bool = False,
    ) -> list[Action]:
        """A process is gone.

        Args:
            name: of the worker.
            returncode: negative for a signal.
            now_s: see the class.
            has_started: False if the command never ran because its host was out of reach.
            trouble: what happened, in words that follow the worker's name, where the return code does not say so.
            last_line: of its output; empty if it printed nothing.
            is_training: whether its training function had not returned.
        """
        worker = self._workers.by_name.pop(name, None)
        if worker is None or self._is_over:
            return []
        actions: list[Action] = []
        if worker.phase is not Phase.LEAVING and worker.may_have_state:
            actions.append(Break(self._round, f"{worker.describe()} is gone"))
        if worker.phase is not Phase.LEAVING:
            if returncode == 0 and (worker.may_have_state or not self._round):
                # As in Horovod: the program says that it has done its work. There that stops the others at their next
                # round, and what they would have trained is lost; here they train to their own end.
                self._runs_down = True
                if is_training:
                    actions.append(self._warn_of_early_end(worker))
            else:
                actions += self._add_death(Death(worker, returncode, trouble, has_started, last_line), now_s)
        return self._finishing([*actions, *self._advance(now_s)])

    def time_passed(self, now_s: float) -> list[Action]:
        """Nothing has happened, but it is `next_deadline_s`."""
        return self._advance(now_s)

    def next_deadline_s(self, now_s: float) -> float | None:
        """When `time_passed` is due, if nothing else happens."""
        times = [deadline.at_s for deadline in self._deadlines()]
        if self._short_since_s is not None and not self._has_waited_too_long(now_s):
            times.append(self._short_since_s + self._limits.elastic_timeout_s)
        release_s = self._blacklist.next_release_s(now_s)
        return min([*times, *([] if release_s is None else [release_s])], default=None)

    def _deadlines(self) -> list[Deadline]:
        return self._workers.deadlines(
            start_timeout_s=self._limits.start_timeout_s, hang_timeout_s=self._limits.hang_timeout_s
        )

    def _add_death(self, death: Death, now_s: float) -> list[Action]:
        """An error of the program is a death as well: what fails on one host may work on the others."""
        worker = death.worker
        if self._deaths.ends_job(worker.name):
            return [self._deaths.finish(death)]
        self._deaths.add(death)
        until_s = self._blacklist.bar(worker.host, now_s)
        how_long = "" if until_s == math.inf else f" for {until_s - now_s:g} s"
        going_on = ", the others go on" if any(other is not worker for other in self._workers.staying()) else ""
        return [
            Say(
                f"{worker.describe()} {self._deaths.describe(death)}; "
                f"host {worker.host} gets no new ranks{how_long}{going_on}"
            )
        ]

    def _warn_of_early_end(self, worker: Worker) -> Say:
        going_on = "; the others go on without it" if self._workers.staying() else ""
        return Say(
            f"warning: {worker.describe()} exited with status 0 before its training function returned; that counts "
            f"as a good end: no rank takes its place, nor that of any other from now on{going_on}. A rank that fails "
            "must raise an exception or exit with another status"
        )

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
        free = self._list_free(now_s)
        # Nobody before there are slots for all: the first would see a smaller job in their environment.
        if not self._workers.num_started and len(free) < self._num_needed(now_s):
            return []
        started = [self._workers.start(host, now_s) for host in free]
        # One that leaves has its slot until it is gone, and a new one takes that over: its local rank is not free.
        leaving = [worker for worker in self._workers.in_phase(Phase.LEAVING) if worker.host in free]
        places = plan_places([worker.candidate() for worker in [*self._workers.wanted(), *leaving]])
        return [Start(worker.name, worker.host, places[worker.name]) for worker in started]

    def _list_free(self, now_s: float) -> list[str]:
        """The host of every slot that may get a worker now."""
        free = [host.name for host in self._hosts for _ in range(self._num_free(host, now_s))]
        most = self._limits.max_num_ranks
        return free if most is None else free[: max(0, most - len(self._workers.wanted()))]

    def _num_free(self, host: Host, now_s: float) -> int:
        if self._blacklist.bars(host.name, now_s):
            return 0
        # A slot is free when its process is gone: a GPU takes no second one before.
        num_taken = sum(worker.host == host.name for worker in self._workers.by_name.values())
        return max(0, host.num_slots - num_taken)

    def _end_late(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for deadline in self._deadlines():
            worker, duty = deadline.worker, deadline.duty
            if deadline.at_s > now_s or worker.is_stopped:
                continue
            if not deadline.is_binding:
                worker.is_noted = True
                actions.append(Say(f"still waiting: {worker.describe()} did not {duty} within {NOTE_TIME_S:g} s"))
                continue
            was_member = worker.phase is Phase.MEMBER
            trouble = f"did not {duty} in time and is ended"
            if worker.phase is Phase.LEAVING:
                actions.append(Say(f"{worker.describe()} {trouble}"))
            else:
                actions += self._add_death(Death(worker, 1, trouble, has_started=False), now_s)
            worker.stop(now_s)
            actions.append(Stop(worker.name))
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
        return [Announce(self._notice, tuple(worker.name for worker in members))]

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
            return self._wait(now_s)
        if self._has_state and not any(worker.ask and worker.ask.serial for worker in chosen):
            return [self._give_up("no rank that had the training's state is left")]
        if self._round and self._resets_left() <= 0:
            reason = f"the reset limit of {self._limits.reset_limit} is reached"
            return [Finish(RESET_LIMIT_STATUS, reason, others=self._deaths.list_others())]
        dismissed: list[Action] = [self._dismiss(worker, now_s) for worker in asking if worker not in chosen]
        return [*dismissed, *self._begin_round(chosen, now_s)]

    def _is_enough(self, chosen: Sequence[Worker], now_s: float) -> bool:
        if not chosen or (self._round == 0 and self._workers.in_phase(Phase.STARTING)):
            return False
        return self._runs_down or len(chosen) >= self._num_needed(now_s)

    def _num_needed(self, now_s: float) -> int:
        if (
            self._round
            or self._has_waited_too_long(now_s)
            or (self._deaths.since_round and not self._can_grow(now_s))
        ):
            return self._limits.min_num_ranks
        return self._limits.first_num_ranks

    def _has_waited_too_long(self, now_s: float) -> bool:
        return self._short_since_s is not None and self._short_since_s + self._limits.elastic_timeout_s <= now_s

    def _wait(self, now_s: float) -> list[Action]:
        """Waits for more slots, says so, and gives up when that is in vain. Ranks on their way take their time."""
        ended = self._conclude()
        if ended or self._runs_down:
            return ended
        needed, num_slots = self._num_needed(now_s), len(self._workers.wanted())
        if not self._workers.num_started:
            num_slots += len(self._list_free(now_s))
        if num_slots >= needed:
            # Where ranks fail again and again as they start, the time goes on: it bounds that.
            if not self._deaths.since_round and not self._has_waited_too_long(now_s):
                self._short_since_s = None
            return []
        if self._short_since_s is None:
            self._short_since_s = now_s
        flag = "-np" if needed == self._limits.first_num_ranks and not self._round else "--min-num-proc"
        text = f"{num_slots} of the {needed} ranks that are needed ({flag}) are there"
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
        cause = self._deaths.choose_cause()
        return Finish(1, reason) if cause is None else self._deaths.finish(cause, f"; {reason}" if reason else "")

    def _dismiss(self, worker: Worker, now_s: float) -> StopWorker:
        assert worker.ask is not None
        worker.enter(Phase.LEAVING, now_s)
        return StopWorker(worker.name, worker.ask.number, f"its slot on {worker.host} is gone")

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
            seat = RankAssignment(self._round, place, needs_sync, self._notice.number, self._deaths.num_all)
            actions.append(Seated(name, asks[name].number, seat))
        self._deaths.since_round.clear()
        self._noticed, self._short_since_s, self._said = set(), None, None
        return actions

    def _resets_left(self) -> float:
        limit = self._limits.reset_limit
        return math.inf if limit is None else limit - (self._round - 1)

    def _conclude(self) -> list[Action]:
        """The end, when no worker is left that could bring the job to one."""
        staying = self._workers.staying()
        if self._round and any(worker.may_have_state for worker in staying):
            return []
        if not self._round and not ((self._runs_down and not staying) or self._has_failed_everywhere(staying)):
            return []
        if not self._deaths.since_round:
            return [Finish(0)]
        if self._round:
            return [self._give_up("no rank that had the training's state is left")]
        return [self._give_up("" if self._runs_down else "no rank has joined the job")]

    def _has_failed_everywhere(self, staying: Sequence[Worker]) -> bool:
        """Whether the program fails in every slot before it asks: new workers there would only repeat that."""
        is_trying = all(worker.phase is Phase.STARTING for worker in staying)
        return is_trying and self._deaths.have_filled({(worker.host, worker.slot) for worker in staying})

"""Membership of an elastic job: decides which workers start, stop and form a round. Does no I/O and reads no clock.

A worker is a process of the job. A round is a period with a fixed assignment of ranks to workers; these workers are
its members. A slot is a place for one worker on a host. A worker joins the job when it requests a rank. `driver`
passes each event and the time to this module, and executes the actions that the module returns. Invariants:

- A round has each rank once, and its members are alive when it begins.
- Rank 0 of a round has the newest state that any live worker has committed (`State.commit`). If the job has a
  committed state and no live worker has it, the job ends; it never restarts silently from the beginning.
- A host that `Blacklist` blocks gets no new worker.
- A round has at least the minimum number of ranks. It may have fewer only after a worker has finished its training.
- A round has a multiple of the number of ranks that the programs ask for, such as those of a replica of a divided
  model. Workers that are too many wait as spare ones, and take part as soon as they complete such a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from datasvc.trainer.elastic.driver.actions import (
    Action,
    Announce,
    AssignRank,
    Break,
    DenyRank,
    Finish,
    PrintMessage,
    Start,
    TerminateWorker,
)
from datasvc.trainer.elastic.driver.limits import Blacklist, Limits
from datasvc.trainer.elastic.driver.workers import (
    NOTE_TIME_S,
    Deadline,
    Death,
    Deaths,
    Phase,
    Worker,
    Workers,
    order_workers,
    plan_placements,
)
from datasvc.trainer.launch.ranks.job import Host
from datasvc.trainer.rendezvous.messages import (
    HostUpdateResult,
    Notice,
    RankAssignment,
    RankRequest,
    ScriptError,
    SilentRanks,
)

# Workers that have joined wait for those that are still starting for at most this time.
_JOIN_TOGETHER_S = 60.0
# Exit status of the launcher if the job ends because of `Limits.reset_limit`.
RESET_LIMIT_STATUS = 3


class JobMembership:
    """The state of a job.

    Each public method except `next_deadline_s` handles an event, and returns the actions to execute, in order. Events
    after a `Finish` are ignored. `now_s` is the time of a monotonic clock.
    """

    def __init__(self, limits: Limits, *, now_s: float) -> None:
        self._limits = limits
        self._blacklist = Blacklist(limits.cooldown_range_s)
        self._hosts: tuple[Host, ...] = ()
        self._workers = Workers()
        self._round = 0  # number of the current round; 0 before the first one
        self._multiple = 1  # see `RankRequest`
        self._has_state = False  # whether a worker has committed a state
        self._is_finishing = False  # whether a worker has finished its training; then no worker is started any more
        self._deaths = Deaths()
        self._notice = Notice()  # the last notice of changed hosts; its number is 0 if none was sent
        self._announced: set[str] = set()  # workers whose join or lost slot was announced in this round
        self._too_few_since_s: float | None = now_s  # start of the wait for slots; None if there are enough
        self._last_wait_message: str | None = None  # so that an equal message is not printed again
        self._is_over = False  # whether a `Finish` was returned
        self._advanced_s = now_s  # time of the last `_advance`; what fell due later is not handled yet

    def hosts_found(self, hosts: Sequence[Host], now_s: float) -> list[Action]:
        """Handle a new list of all hosts; each host is listed once."""
        self._hosts = tuple(hosts)
        return self._advance(now_s)

    def rank_requested(self, request: RankRequest, now_s: float) -> list[Action]:
        """Handle a worker's request for a rank in the next round."""
        worker = self._workers.by_name.get(request.worker)
        if worker is None or worker.phase is Phase.LEAVING:
            return []
        # The worker continues, so its program has caught the error that it reported.
        self._deaths.errors.pop(request.worker, None)
        worker.failing_since_s = None
        worker.request = request
        self._multiple = max(1, request.multiple)
        worker.enter(Phase.WAITING, now_s)
        self._has_state = self._has_state or request.serial > 0  # see `Worker.serial`
        return self._advance(now_s)

    def worker_started(self, name: str, now_s: float) -> list[Action]:
        """Handle the start of a worker's command, or the report that it cannot start."""
        worker = self._workers.by_name.get(name)
        if worker is not None:
            worker.started_s = now_s
        return self._advance(now_s)

    def script_failed(self, error: ScriptError, now_s: float) -> list[Action]:
        """Handle a worker's report that its program exits with an error. Terminate it later if it still runs."""
        self._deaths.errors[error.worker] = error
        worker = self._workers.by_name.get(error.worker)
        if worker is not None:
            worker.failing_since_s = now_s
        return self._advance(now_s)

    def ranks_silent(self, report: SilentRanks, now_s: float) -> list[Action]:
        """Handle the report of a member that others of its round do not answer. End their processes.

        The others may wait for them in a collective that only the end of their connections ends.
        """
        actions: list[Action] = []
        for worker in self._workers.in_phase(Phase.MEMBER) if report.round_number == self._round else ():
            if worker.old_rank in report.ranks and not self._is_over:
                actions += self._terminate(worker, "gave no sign of life and is terminated", now_s)
        return self._cut_after_finish([*actions, *self._advance(now_s)])

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
        """Handle the end of a worker's process; see `Death`. With `is_training`, its training has not ended."""
        worker = self._workers.by_name.pop(name, None)
        if worker is None or self._is_over:
            return []
        actions: list[Action] = []
        if worker.phase is not Phase.LEAVING:
            if worker.may_have_state and not worker.is_spare:  # a spare one is in no round
                # Members that wait to connect to this worker stop waiting.
                actions.append(Break(self._round, f"{worker.describe()} has exited"))
            # Before the first round, status 0 is always a success. Later it is a death if the worker was in no round,
            # because it has not trained.
            has_trained = worker.may_have_state and not worker.is_spare
            if returncode == 0 and (has_trained or not self._round):
                # As in Horovod, status 0 means that the program has finished. But Horovod then stops the other ranks
                # at their next round. Here they train to their end, so that none of their training is lost.
                self._is_finishing = True
                if is_training:
                    actions.append(self._warn_of_early_end(worker))
            else:
                actions += self._add_death(Death(worker, returncode, trouble, has_started, last_line), now_s)
        return self._cut_after_finish([*actions, *self._advance(now_s)])

    def time_passed(self, now_s: float) -> list[Action]:
        """Handle the deadlines that have passed. Called at the time that `next_deadline_s` returned, or later."""
        return self._advance(now_s)

    def next_deadline_s(self) -> float | None:
        """Return when to call `time_passed` if no event comes first, perhaps a past time; None: no deadline."""
        times = [deadline.at_s for deadline in self._deadlines()]
        if self._too_few_since_s is not None and not self._has_waited_too_long(self._advanced_s):
            times.append(self._too_few_since_s + self._limits.elastic_timeout_s)
        release_s = self._blacklist.next_release_s(self._advanced_s)  # when a blocked host may get workers again
        hold_s = self._announce_joined_at_s()
        if hold_s is not None and hold_s > self._advanced_s:
            times.append(hold_s)
        return min([*times, *([] if release_s is None else [release_s])], default=None)

    def _deadlines(self) -> list[Deadline]:
        return self._workers.deadlines(
            start_timeout_s=self._limits.start_timeout_s, hang_timeout_s=self._limits.hang_timeout_s
        )

    def _add_death(self, death: Death, now_s: float) -> list[Action]:
        """Record a death, block its host, and return a message; or return the `Finish` if the death ends the job."""
        # The program may work on other hosts, unless it has reported an error that a new round cannot repair.
        worker = death.worker
        if self._deaths.ends_job(worker.name):
            return [self._deaths.finish(death)]
        self._deaths.add(death)
        until_s = self._blacklist.block(worker.host, now_s)
        how_long = "" if until_s == math.inf else f" for {until_s - now_s:g} s"
        outcome = ", the others continue" if any(other is not worker for other in self._workers.staying()) else ""
        return [
            PrintMessage(
                f"{worker.describe()} {self._deaths.describe(death)}; "
                f"host {worker.host} gets no new ranks{how_long}{outcome}"
            )
        ]

    def _warn_of_early_end(self, worker: Worker) -> PrintMessage:
        outcome = "; the others continue without it" if self._workers.staying() else ""
        return PrintMessage(
            f"warning: {worker.describe()} exited with status 0 before its training function returned; that counts "
            f"as success: from now on no rank is replaced{outcome}. A rank that fails must raise an exception or "
            "exit with another status"
        )

    def _advance(self, now_s: float) -> list[Action]:
        """Return the actions that the current state requires; called after each event."""
        if self._is_over:
            return []
        self._advanced_s = now_s
        # Slots are updated first, because a worker that has lost its slot no longer counts towards `max_num_ranks`.
        actions = [*self._update_slots(now_s), *self._start_workers(now_s), *self._stop_late(now_s)]
        actions += self._form_round(now_s)
        return self._cut_after_finish([*actions, *self._announce(now_s), *self._conclude()])

    def _cut_after_finish(self, actions: list[Action]) -> list[Action]:
        for index, action in enumerate(actions):
            if isinstance(action, Finish):
                self._is_over = True
                return actions[: index + 1]
        return actions

    def _update_slots(self, now_s: float) -> list[Action]:
        """Record which workers have lost their slots. Terminate those of them that are in no round."""
        slots = {host.name: host.num_slots for host in self._hosts}
        actions: list[Action] = []
        num_on_host: dict[str, int] = {}
        for worker in sorted(self._workers.staying(), key=Worker.precedence):
            num_on_host[worker.host] = num_on_host.get(worker.host, 0) + 1
            if num_on_host[worker.host] <= slots.get(worker.host, 0):
                worker.slot_lost_s = None
            elif not worker.has_lost_slot:
                worker.slot_lost_s = now_s
            if worker.has_lost_slot and (worker.phase is Phase.STARTING or worker.is_spare):
                worker.stop(now_s)
                actions.append(TerminateWorker(worker.name))
        return actions

    def _start_workers(self, now_s: float) -> list[Action]:
        """Start a worker on each free slot, unless the job is finishing, or has enough workers for its last round."""
        is_last_round = bool(self._round) and self._resets_left() <= 0
        if self._is_finishing or (is_last_round and len(self._workers.with_slot()) >= self._limits.min_num_ranks):
            return []
        free = self._list_free_slots(now_s)
        # The first workers start together when there are enough slots, because their environment describes the job.
        if not self._workers.num_started and len(free) < self._num_needed(now_s):
            return []
        started = [self._workers.start(host, now_s) for host in free]
        # A leaving worker keeps its slot and its local rank until it exits; only its replacement gets them.
        leaving = [worker for worker in self._workers.in_phase(Phase.LEAVING) if worker.host in free]
        placements = plan_placements(order_workers([*self._workers.with_slot(), *leaving], self._multiple))
        return [Start(worker.name, worker.host, placements[worker.name]) for worker in started]

    def _list_free_slots(self, now_s: float) -> list[str]:
        """Return the hosts on which workers may start at `now_s`, each host once per free slot."""
        free = [host.name for host in self._hosts for _ in range(self._num_free_slots(host, now_s))]
        max_num_ranks = self._limits.max_num_ranks
        return free if max_num_ranks is None else free[: max(0, max_num_ranks - len(self._workers.with_slot()))]

    def _num_free_slots(self, host: Host, now_s: float) -> int:
        if self._blacklist.is_blocked(host.name, now_s):
            return 0
        # A slot is free only after its process has exited: until then the process occupies the GPU.
        num_taken = sum(worker.host == host.name for worker in self._workers.by_name.values())
        return max(0, host.num_slots - num_taken)

    def _stop_late(self, now_s: float) -> list[Action]:
        """Terminate the workers that have missed a binding deadline (see `Deadline`); print a note for the others."""
        actions: list[Action] = []
        for deadline in self._deadlines():
            worker, duty = deadline.worker, deadline.duty
            if deadline.at_s > now_s or worker.is_stopped:
                continue
            if not deadline.is_binding:
                worker.is_noted = True
                actions.append(
                    PrintMessage(f"still waiting: {worker.describe()} did not {duty} within {NOTE_TIME_S:g} s")
                )
                continue
            actions += self._terminate(worker, f"did not {duty} in time and is terminated", now_s)
        return actions

    def _terminate(self, worker: Worker, trouble: str, now_s: float) -> list[Action]:
        """Terminate a worker for which the others wait."""
        actions: list[Action] = []
        was_member = worker.phase is Phase.MEMBER  # read before `stop` changes the phase
        if worker.phase is Phase.LEAVING:  # its end is expected, so it is no death
            actions.append(PrintMessage(f"{worker.describe()} {trouble}"))
        else:
            # The worker has no return code yet, so take 1, the status of a general error.
            actions += self._add_death(Death(worker, 1, trouble, has_started=False), now_s)
        worker.stop(now_s)
        actions.append(TerminateWorker(worker.name))
        if was_member:
            actions.append(Break(self._round, f"{worker.describe()} does not respond"))
        return actions

    def _announce_joined_at_s(self) -> float | None:
        """Return when the new workers that have joined are announced at the latest; None if none has joined."""
        times = [worker.since_s for worker in self._workers.in_phase(Phase.WAITING) if not worker.may_have_state]
        return min(times) + _JOIN_TOGETHER_S if times else None

    def _announce(self, now_s: float) -> list[Action]:
        """Return a notice to the members if workers have joined or have lost their slots since the last notice."""
        members = self._workers.in_phase(Phase.MEMBER)
        if self._is_finishing or not members:
            return []
        waiting = self._workers.in_phase(Phase.WAITING)
        added = {
            worker.name
            for worker in waiting
            if (worker.is_spare or not worker.may_have_state) and not worker.has_lost_slot
        }
        num_staying = sum(not worker.has_lost_slot for worker in members)
        if (num_staying + len(added)) // self._multiple <= num_staying // self._multiple:
            added = set()  # the next round could not use them
        is_starting = any(worker.failing_since_s is None for worker in self._workers.in_phase(Phase.STARTING))
        if is_starting and now_s < (self._announce_joined_at_s() or -math.inf):
            # Workers that start together join together: with a notice for the first of them, each new host would cost
            # the training two rounds. The members train on meanwhile.
            added = set()
        removed = {worker.name for worker in members if worker.has_lost_slot}
        if added | removed <= self._announced:
            return []
        self._announced |= added | removed
        result = (HostUpdateResult.removed if removed else 0) | (HostUpdateResult.added if added else 0)
        self._notice = Notice(self._notice.number + 1, result)
        return [Announce(self._notice, tuple(worker.name for worker in members))]

    def _form_round(self, now_s: float) -> list[Action]:
        """Begin the next round if enough workers wait for it; otherwise wait, or end the job."""
        waiting = self._workers.in_phase(Phase.WAITING)
        # While the current round has members, no other round begins, and the time limit for slots does not run.
        if self._workers.in_phase(Phase.MEMBER):
            self._too_few_since_s = None
            return []
        chosen = [worker for worker in waiting if not worker.has_lost_slot]
        if self._has_state and not any(worker.serial for worker in chosen):
            # All workers that have the state have lost their slots. They take part in one more round, so that the
            # other workers can copy the state from them.
            chosen = [worker for worker in waiting if not worker.has_lost_slot or worker.may_have_state]
        # New workers do not have the job's state. So after the first round, they wait for a worker that may have it.
        if self._round and chosen and not any(worker.may_have_state for worker in chosen):
            return []
        num_ranks = len(chosen) - len(chosen) % self._multiple
        if not num_ranks and self._is_finishing and any(not worker.is_spare for worker in chosen):
            return [
                self._fail_job(f"{len(chosen)} ranks are left, and a replica of the model needs {self._multiple}")
            ]
        if not self._is_enough(chosen[:num_ranks], now_s):
            return self._wait(now_s)
        if self._has_state and not any(worker.serial for worker in chosen):
            return [self._fail_job("no rank that had the training's state is left")]
        if self._round and self._resets_left() <= 0:
            reason = f"the reset limit of {self._limits.reset_limit} is reached"
            return [Finish(RESET_LIMIT_STATUS, reason, others=self._deaths.list_others())]
        denials: list[Action] = []
        for worker in waiting:
            if worker not in chosen:  # every waiting worker with a slot is chosen
                assert worker.request is not None
                worker.enter(Phase.LEAVING, now_s)
                reason = f"its slot on {worker.host} was removed"
                denials.append(DenyRank(worker.name, worker.request.number, reason))
        ordered = order_workers(chosen, self._multiple)
        return [
            *denials,
            *self._begin_round(ordered[:num_ranks], now_s),
            *self._keep_waiting(ordered[num_ranks:], num_ranks),
        ]

    def _keep_waiting(self, spare: Sequence[Worker], num_ranks: int) -> list[Action]:
        """Record workers that a round of `num_ranks` ranks has begun without; they keep their requests."""
        for worker in spare:
            worker.is_spare = True
        if not spare:
            return []
        waits = "1 other waits" if len(spare) == 1 else f"{len(spare)} others wait"
        text = f"{num_ranks} ranks train, and {waits} for more ranks: a replica of the model needs {self._multiple}"
        return [PrintMessage(text)]

    def _is_enough(self, chosen: Sequence[Worker], now_s: float) -> bool:
        # The first round waits for all workers that are starting.
        if not chosen or (self._round == 0 and self._workers.in_phase(Phase.STARTING)):
            return False
        return self._is_finishing or len(chosen) >= self._num_needed(now_s)

    def _num_needed(self, now_s: float) -> int:
        least = -(-self._limits.min_num_ranks // self._multiple) * self._multiple
        # The minimum is enough for a later round, after a long wait, or if a dead worker cannot be replaced.
        if (
            self._round
            or self._has_waited_too_long(now_s)
            or (self._deaths.since_round and not self._can_grow(now_s))
        ):
            return least
        first = self._limits.first_num_ranks
        return max(first - first % self._multiple, least)

    def _has_waited_too_long(self, now_s: float) -> bool:
        return self._too_few_since_s is not None and self._too_few_since_s + self._limits.elastic_timeout_s <= now_s

    def _wait(self, now_s: float) -> list[Action]:
        """Print that the job waits for slots. End the job if no slot can appear, or if the time limit has passed."""
        finish = self._conclude()
        if finish or self._is_finishing:
            return finish
        needed, num_slots = self._num_needed(now_s), len(self._workers.with_slot())
        if not self._workers.num_started:  # the first workers start only when there are enough slots
            num_slots += len(self._list_free_slots(now_s))
        if num_slots >= needed:
            # There are enough slots, so stop the time limit. Two exceptions: after a death it keeps running, because
            # it also limits repeated failures before the first round; and once it is over, `_num_needed` needs it.
            if not self._deaths.since_round and not self._has_waited_too_long(now_s):
                self._too_few_since_s = None
            return []
        if self._too_few_since_s is None:
            self._too_few_since_s = now_s
        flag = "-np" if needed == self._limits.first_num_ranks and not self._round else "--min-num-proc"
        text = f"{num_slots} of the {needed} required ranks ({flag}) are available"
        if self._multiple > 1:
            text += f", and a replica of the model needs {self._multiple}"
        if self._has_waited_too_long(now_s):
            return [self._fail_job(f"{text}: no more joined within {self._limits.elastic_timeout_s:g} s")]
        if not self._can_grow(now_s):
            return [self._fail_job(f"{text}, and no host has a free slot")]
        if self._workers.in_phase(Phase.STARTING) or text == self._last_wait_message:
            return []
        self._last_wait_message = text
        return [PrintMessage(f"{text}: waiting for hosts, {self._limits.elastic_timeout_s:g} s at most")]

    def _can_grow(self, now_s: float) -> bool:
        """Return whether a worker that does not wait for a rank now may request one later."""
        # It may start on a new host, run already, replace a worker that exits, or start on a host whose block ends.
        return (
            self._limits.hosts_can_change
            or len(self._workers.by_name) > len(self._workers.in_phase(Phase.WAITING))
            or self._blacklist.next_release_s(now_s) is not None
        )

    def _fail_job(self, reason: str) -> Finish:
        """Return the `Finish` of a job that cannot continue. It names the dead worker that caused this, if any."""
        cause = self._deaths.choose_cause()
        return Finish(1, reason) if cause is None else self._deaths.finish(cause, f"; {reason}" if reason else "")

    def _begin_round(self, chosen: Sequence[Worker], now_s: float) -> list[Action]:
        """Begin a round with the chosen workers, and return the answers to their requests."""
        self._round += 1
        requests = {worker.name: worker.request for worker in chosen if worker.request is not None}
        # Members with unequal states, or without a state, must copy that of rank 0 (see `Worker.serial`).
        serials = {request.serial for request in requests.values()}
        needs_sync = len(serials) > 1 or 0 in serials or any(request.wants_sync for request in requests.values())
        # A spare worker may have the state of a commit that the others have undone, with an equal serial.
        needs_sync |= any(worker.is_spare for worker in chosen)
        actions: list[Action] = []
        if len(chosen) < self._limits.min_num_ranks:
            few = f"{len(chosen)} of the {self._limits.min_num_ranks} ranks of --min-num-proc"
            actions.append(PrintMessage(f"the job finishes with {few}"))
        for name, placement in plan_placements(chosen).items():
            worker = self._workers.by_name[name]
            worker.old_rank, worker.is_spare = placement.rank, False
            worker.enter(Phase.MEMBER, now_s)
            assignment = RankAssignment(self._round, placement, needs_sync, self._notice.number, self._deaths.num_all)
            actions.append(AssignRank(name, requests[name].number, assignment))
        # Earlier deaths cannot be the cause of a failure in this round.
        self._deaths.since_round.clear()
        self._announced, self._too_few_since_s, self._last_wait_message = set(), None, None
        return actions

    def _resets_left(self) -> float:
        limit = self._limits.reset_limit
        return math.inf if limit is None else limit - (self._round - 1)

    def _conclude(self) -> list[Action]:
        """Return the `Finish` of the job if no remaining worker can continue it, otherwise an empty list."""
        staying = self._workers.staying()
        # After the first round has begun, only a worker that was in a round can continue the job.
        can_continue = [worker for worker in staying if worker.may_have_state]
        if self._is_finishing:
            # Spare workers have nothing to do any more: the launcher ends them.
            can_continue = [worker for worker in can_continue if not worker.is_spare]
        if self._round and can_continue:
            return []
        # Before the first round, the job waits until all workers have finished, or the program has failed everywhere.
        have_all_finished = self._is_finishing and not staying
        # New workers would fail too if the program failed in every slot before it joined.
        none_has_joined = all(worker.phase is Phase.STARTING for worker in staying)
        slots = {(worker.host, worker.slot) for worker in staying}
        has_failed_everywhere = none_has_joined and self._deaths.cover_slots(slots)
        if not self._round and not have_all_finished and not has_failed_everywhere:
            return []
        # Without a failure since the last round began, all members of that round have finished.
        if not self._deaths.since_round:
            return [Finish(0)]
        if self._round:
            return [self._fail_job("no rank that had the training's state is left")]
        return [self._fail_job("" if self._is_finishing else "no rank has joined the job")]

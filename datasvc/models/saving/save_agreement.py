"""Agreement of all ranks, in the calling thread: whether they save after a step, and what each of them saves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.local.restore_choice import RepositoryHead
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.preemption import Preemption
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.models.saving.save_policy import SaveScheduler
from datasvc.models.saving.shared_plan import HeldTensor, SharedPlan, outline, plan_shared
from datasvc.models.versions.entry_fields import read_step
from datasvc.repository import Repository, parse_reference
from datasvc.repository.objects.objects import digest_of


class DueSaves:
    """Decides after each step, the same on all ranks, whether a save to the repository is due and the run must end.

    Args:
        channel: channel of the training thread.
        scheduler: decides for this rank.
        preemption: signals that this process receives; None: they are not handled.
        needs_clock: whether the decision depends on time, see `SavePolicy`.

    Attributes:
        stop_signal: number of the signal for which all ranks have agreed to end the run; None: continue.
    """

    def __init__(
        self, channel: RankChannel, scheduler: SaveScheduler, preemption: Preemption | None, *, needs_clock: bool
    ) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._preemption = preemption
        # Without a clock and signals, the decision depends only on the step number, so the ranks need no exchange.
        self._needs_exchange = needs_clock or preemption is not None
        self._next_check = 0  # step at which the ranks next exchange messages
        self._last_step = -1
        self.stop_signal: int | None = None

    def decide(self, step: int, *, is_saving: bool, if_idle: bool, since: int | None = None) -> bool:
        """Return whether a save is due. Every rank calls this after each step.

        Args:
            step: number of steps.
            is_saving: whether a save to the repository is queued or running on this rank.
            if_idle: whether a save is also due if none is queued or running on any rank.
            since: see `SaveScheduler.decide`.

        Raises:
            ConfigError: the ranks are at different steps.
            UnavailableError: a rank is lost.
        """
        self._scheduler.end_step(is_saving=is_saving)
        if step <= self._last_step:
            self._next_check = 0  # the run has gone back to an earlier state
        self._last_step = step
        # Rank 0 has computed `_next_check` for all ranks, so all of them skip the same exchanges.
        if self._channel.size > 1 and step < self._next_check and not if_idle:
            return False
        decision = self._scheduler.decide(step, is_saving=is_saving, since=since)
        signal_number = None if self._preemption is None else self._preemption.received
        answers: list[Any] = [[step, decision.is_due, decision.next_step, signal_number, is_saving]]  # by rank
        if self._needs_exchange or if_idle:
            answers = self._channel.exchange(answers[0])
        steps = [answer[0] for answer in answers]
        if len(set(steps)) > 1:
            raise ConfigError(f"the ranks called should_save() after different steps; by rank: {steps}")
        # Clocks differ between ranks, so all ranks use the decision of rank 0.
        is_due, self._next_check = answers[0][1:3]
        # The queue of a rank may be emptied later than that of rank 0: a save would wait for it, or be refused.
        is_due = is_due or (if_idle and not any(answer[4] for answer in answers))
        # A signal that one rank has received stops all ranks.
        signals = [answer[3] for answer in answers if answer[3] is not None]
        self.stop_signal = signals[0] if signals else None
        return bool(is_due or signals)


class SaveAgreement:
    """What all ranks of a job save; every rank calls `agree` for each save.

    Args:
        channel: channel of the calling threads.
        mark_reported: see `SaveQueue.mark_reported`.
    """

    def __init__(self, channel: RankChannel, mark_reported: Callable[[Collection[int]], None]) -> None:
        self._channel, self._mark_reported = channel, mark_reported
        # Digests of what the ranks held when the plan of their sharded or different tensors was made, and the plan.
        self._planned: tuple[list[Any], SharedPlan] | None = None

    def agree(
        self, step: int, to: str, flat_state: FlatState | None, reported: list[int], error: Exception | None
    ) -> FlatState:
        """Check that no rank has an error, and that all ranks save the same step; return the state with its plan.

        Args:
            step: step of this rank.
            to: where it saves to.
            flat_state: its state; None if it has an error.
            reported: numbers of the earlier saves whose errors this rank reports in this call.
            error: error of this rank, which all ranks raise; None: none.

        Raises:
            ConfigError: the ranks save different steps, to different places, or states that do not fit.
            DatasvcError: a rank has an error.
        """
        channel = self._channel
        if channel.size == 1:
            if error is not None:
                raise error
            assert flat_state is not None
            if not flat_state.parts:
                return flat_state
        # What a rank holds is a long text, so send its digest; send the text only if the ranks hold different things.
        digests = [] if flat_state is None else [digest_of(text.encode()) for text in flat_state.descriptions]
        # A rank with an error takes part too: otherwise the other ranks would wait for it.
        answers = channel.exchange([describe_error(error), None if error else [step, to], digests, reported])
        # A save fails on all ranks. If one rank reports the error, the others must not report it again.
        self._mark_reported({number for answer in answers for number in answer[3]})
        raise_on_all_ranks([answer[0] for answer in answers], error)
        for index, what in enumerate(("save different steps", "save to different places (to=)")):
            by_rank = [answer[1][index] for answer in answers]
            if len(set(by_rank)) > 1:
                raise ConfigError(f"the ranks {what}; by rank: {by_rank}")
        assert flat_state is not None
        digests_by_rank = [answer[2] for answer in answers]
        if not flat_state.parts and all(digests == digests_by_rank[0] for digests in digests_by_rank):
            return flat_state
        # Sharded tensors, or ranks with different tensors. Both stay the same during a run, and so does the plan.
        if self._planned is None or self._planned[0] != digests_by_rank:
            described = channel.exchange([flat_state.held, outline(flat_state.skeleton)])
            held = [
                {name: HeldTensor.from_json(tensor) for name, tensor in tensors.items()} for tensors, _ in described
            ]
            self._planned = digests_by_rank, plan_shared(held, [skeleton for _, skeleton in described])
        return replace(flat_state, plan=self._planned[1])


class LookUp(NamedTuple):
    """What is in the repository, the same on all ranks.

    Attributes:
        error: error of rank 0, as all ranks raise it; None: it has found the answer.
        version: version of the reference; None: the model has none.
        head: newest version of the model; None: it could not be read.
    """

    error: DatasvcError | None
    version: str | None
    head: RepositoryHead | None


def look_up(channel: RankChannel, repository: Repository, name: str, ref: str | None, *, has_default: bool) -> LookUp:
    """Return what rank 0 finds; every rank calls this. A tag may be moved between the look-ups of several ranks.

    Args:
        channel: channel between the ranks.
        repository: repository of the model.
        name: name of the model.
        ref: a version or tag of any model; None: the newest version of this model.
        has_default: whether a model without versions is no error.

    Raises:
        LostRankError: a rank is lost.
    """
    error: Exception | None = None
    version, head = None, None
    try:
        if channel.rank == 0:
            head = _read_head(repository, name)
            other = parse_reference(ref or name, "model").name
            if not has_default or repository.newest("models", other) is not None:
                version = str(repository.resolve("models", ref or name))
    except Exception as failure:  # noqa: BLE001 - returned on all ranks
        error = failure
    answers = channel.exchange([describe_error(error), version, head])
    _, version, found = answers[0]
    head = None if found is None else RepositoryHead(*found)
    try:
        raise_on_all_ranks([answer[0] for answer in answers], error)
    except DatasvcError as failure:
        return LookUp(failure, None, head)
    return LookUp(None, version, head)


def _read_head(repository: Repository, name: str) -> RepositoryHead:
    newest = repository.newest("models", name)
    if newest is None:
        return RepositoryHead()
    entry = repository.entry(newest).content
    return RepositoryHead(newest.version, read_step(entry, newest), str(entry.get("branch", "")))

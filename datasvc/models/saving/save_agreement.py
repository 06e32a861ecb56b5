"""Agreement of all ranks on a save, in the calling thread: the step, the place, and who holds which tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from datasvc.errors import ConfigError
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.models.saving.shared_plan import HeldTensor, SharedPlan, outline, plan_shared
from datasvc.repository.objects.objects import digest_of


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

"""Tournaments between replicas: each rank trains alone, and in rounds the losers of pairs take over the winners.

The rounds are those of LTFB (Jacobs et al., "Parallelizing Training of Deep Generative Models on Massive Scientific
Datasets", 2019). With `perturb`, the learning rates of the ranks differ and evolve, as in population based training
(Jaderberg et al. 2017).

Invariant: all ranks decide from the same gathered losses, so they agree on all winners, and on all rates. Pairs and
changes of rates are functions of the seed, the number of the round, and the rank.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from datasvc.keyed_random import derive_keys, uniform
from datasvc.trainer.gradients.gradient_bucket import layout_of
from datasvc.trainer.job import runtime
from datasvc.trainer.job.submit import submit_allgather, submit_alltoall
from datasvc.trainer.optim.broadcast_state import (
    TensorDescription,
    adopt_values,
    broadcast_parameters,
    describe_values,
    pickle_object,
    prepare_values,
)
from datasvc.trainer.optim.parameter_names import parameters_of
from datasvc.trainer.optim.sync_policy import SyncPolicy

Judge = Callable[[], float]
"""Returns the loss of the present weights of this rank on held-out samples, the same samples on all ranks."""

_PAIRS, _RATES = 49, 50  # values of `purpose` for `derive_keys`; the cache planner has 48
_MAX_ROUNDS: Final = 100
_MAX_RANKS: Final = 20  # of that many rounds; of more ranks, fewer rounds are kept
# The number of rows that a rank sends is an int32, so a row is more than a byte.
_ROW_BYTES: Final = 4096


class Tournament:
    """The rounds of the policy "tournament", and what this rank keeps between them.

    Args:
        policy: when rounds are due, and by how much rates change.
        judge: see `Judge`.
        buffers: tensors that a loser takes over beside trainable weights, such as the statistics of a model's batch
            normalisation.
        seed: seed of pairs and rates, equal on all ranks.
        name: name of the operations, the same on every rank.

    Attributes:
        rounds: the last rounds, the oldest first, each a dict of JSON values: "step" and "round", from 0; "pairs", a
            list of [winner, loser]; "losses" by rank, None for one that is not finite; and with `perturb`, "factors"
            of the rates by rank, after the round. Complete on rank 0; a rank that has loaded a state may lack some.
        comparison: the last comparison of all ranks: "winner" and "losses"; {} before the first.
    """

    def __init__(self, policy: SyncPolicy, judge: Judge, buffers: Iterable[Tensor], seed: int, name: str) -> None:
        self._policy, self._judge, self._buffers = policy, judge, list(buffers)
        self._seed, self._name = seed, name
        self.comparison: dict[str, Any] = {}
        self._restart()

    @property
    def factor(self) -> float:
        """The factor of this rank's learning rates."""
        return float(self._policy.perturb**self._exponent)

    def describe(self) -> dict[str, Any]:
        """Return rounds and last comparison as JSON values, for the field `tournament` of `Execution`."""
        return {"rounds": list(self.rounds), **self.comparison}

    @contextlib.contextmanager
    def scaled_rates(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Multiply the learning rates of parameter groups by `factor` in this context."""
        rates = [group.get("lr") for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None and self._exponent:
                group["lr"] = rate * self.factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None and self._exponent:
                    group["lr"] = rate

    def play(self, step: int, optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], text: str) -> None:
        """Make the round after a step: judge, and replace the losers. Every rank calls this.

        A loser gets weights, buffers, the state of the optimizer for each parameter, and the factor of the winner,
        which is then multiplied by `perturb` or its inverse. `text` names the round, and is compared between ranks.
        """
        number = step // self._policy.steps - 1
        losses, exponents = self._judge_all(text)
        pairs = [
            sorted(pair, key=lambda rank: _order(losses, rank))
            for pair in pair_ranks(self._seed, number, runtime.size())
        ]
        self._hand_over(pairs, optimizer, weights, text)
        for winner, loser in pairs:
            exponents[loser] = exponents[winner] + change_exponent(self._seed, number, loser)
        self._exponent = exponents[runtime.rank()]
        played = {"step": step, "round": number, "pairs": pairs, "losses": _finite(losses)}
        if self._policy.perturb != 1:
            played["factors"] = [self._policy.perturb**exponent for exponent in exponents]
        self.rounds.append(played)

    @contextlib.contextmanager
    def winner_weights(self, weights: Sequence[Tensor], text: str) -> Iterator[None]:
        """Give weights and buffers the values of the best rank, and then their own again. Every rank calls this."""
        losses, _ = self._judge_all(text)
        winner = min(range(runtime.size()), key=lambda rank: _order(losses, rank))
        self.comparison = {"winner": winner, "losses": _finite(losses)}
        tensors = [tensor.detach() for tensor in (*weights, *self._buffers)]
        own = [tensor.clone() for tensor in tensors]
        broadcast_parameters(tensors, winner)
        try:
            yield
        finally:
            for tensor, values in zip(tensors, own, strict=True):
                tensor.copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank. The rounds, which are equal on all ranks, are in that of rank 0 only."""
        rank, size = runtime.rank(), runtime.size()
        return {"rank": rank, "size": size, "exponent": self._exponent, "rounds": [] if rank else list(self.rounds)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a state; the factor only if this rank of as many has saved it. None: begin again."""
        self._restart()
        if state is not None:
            self.rounds.extend(state["rounds"])
            if (state["rank"], state["size"]) == (runtime.rank(), runtime.size()):
                self._exponent = state["exponent"]

    def _restart(self) -> None:
        num_rounds = max(1, min(_MAX_ROUNDS, _MAX_ROUNDS * _MAX_RANKS // runtime.size()))
        self.rounds: deque[dict[str, Any]] = deque(maxlen=num_rounds)
        # Exponents and not factors: these would accumulate rounding errors. Without `perturb`, all factors are 1.
        self._exponent = first_exponent(self._seed, runtime.rank())

    @torch.no_grad()
    def _judge_all(self, text: str) -> tuple[list[float], list[int]]:
        """Return the loss of each rank, as its own judge finds it, and its exponent."""
        own = torch.tensor([[float(self._judge()), self._exponent]], dtype=torch.float64, device="cpu")
        handle = submit_allgather([own], name=f"{self._name}.losses", round=text)
        losses, exponents = cast("Tensor", handle.wait()).T.tolist()
        return losses, [int(exponent) for exponent in exponents]

    def _hand_over(
        self, pairs: Sequence[Sequence[int]], optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], text: str
    ) -> None:
        """Send the state of each winner, the first of its pair, to the loser, which takes it over."""
        rank, size, device = runtime.rank(), runtime.size(), weights[0].device
        to = next((loser for winner, loser in pairs if winner == rank), None)
        parameters, layout = parameters_of(optimizer), layout_of(weights)
        values = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
        descriptions = [describe_values(each) for each in values]

        def exchange(rows: Tensor, kind: str) -> Tensor:
            splits = [len(rows) if other == to else 0 for other in range(size)]
            sent, name = rows if any(splits) else rows[:0], f"{self._name}.{kind}"
            return cast("Tensor", submit_alltoall(sent, splits, name=name, layout=layout, round=text).wait())

        header = exchange(torch.frombuffer(bytearray(pickle_object(descriptions)), dtype=torch.uint8), "description")
        is_loser = any(loser == rank for _, loser in pairs)
        if is_loser:
            descriptions = pickle.loads(header.numpy().tobytes())  # noqa: S301 - from a rank of this job
            values = [prepare_values(*both, device) for both in zip(values, descriptions, strict=True)]
        tensors = [tensor.detach() for tensor in (*weights, *self._buffers)]
        for state, described in zip(values, descriptions, strict=True):
            tensors += [state[name] for name, value in described.items() if isinstance(value, TensorDescription)]
        received = exchange(_to_rows(tensors, device) if to is not None else _to_rows([], device), "state")
        if is_loser:
            _copy_rows(received, tensors)
            adopt_values(optimizer, parameters, [*values, *({} for _ in optimizer.param_groups)])


def pair_ranks(seed: int, round_number: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks of a round. Each rank is in one; of an odd number of ranks, one is in none."""
    key = derive_keys(seed, round_number, _PAIRS, 1)[0]
    # Sort by random numbers. `KeyedPermutation` is made for many elements: of 16, its pairs are not equally likely.
    order = np.argsort(uniform(key, np.arange(num_ranks), 0), kind="stable").tolist()
    return list(zip(order[::2], order[1::2], strict=False))


def first_exponent(seed: int, rank: int) -> int:
    """Return the exponent of the first factor of a rank: -1, 0 or 1."""
    return int(3 * uniform(derive_keys(seed, 0, _RATES, 1)[0], np.array([rank]), 0)[0]) - 1


def change_exponent(seed: int, round_number: int, rank: int) -> int:
    """Return the change of the exponent of a rank that loses in a round: -1 or 1."""
    number = uniform(derive_keys(seed, round_number + 1, _RATES, 1)[0], np.array([rank]), 0)[0]
    return 1 if number < 0.5 else -1


def _order(losses: Sequence[float], rank: int) -> tuple[float, int]:
    """Return a key by which the better of two ranks is first. NaN is the worst; the lower rank wins a tie."""
    loss = losses[rank]
    return math.inf if math.isnan(loss) else loss, rank


def _finite(losses: Sequence[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses]


def _to_rows(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of all tensors: `uint8[n, _ROW_BYTES]`, the last row filled up with zeros."""
    parts = [tensor.reshape(-1).view(torch.uint8).to(device) for tensor in tensors]
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _ROW_BYTES)).view(-1, _ROW_BYTES)


def _copy_rows(rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with the bytes that `_to_rows` has made of tensors like these."""
    flat, start = rows.view(-1), 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        # A copy is aligned for any dtype; a part of `flat` may not be.
        tensor.copy_(flat[start:stop].clone().view(tensor.dtype).view(tensor.shape))
        start = stop

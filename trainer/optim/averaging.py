"""Optimizer that averages weights over the ranks every few steps, in place of gradients in every step.

Between two rounds the ranks do not communicate, and their weights differ. `sync_policy` says when a round is due.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.gradient_bucket import layout_of, pack, unpack
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, add_process_sets, global_process_set
from datasvc.trainer.job.submit import submit_allreduce, submit_alltoall
from datasvc.trainer.optim.adasum_optimizer import wrap_optimizer
from datasvc.trainer.optim.broadcast_state import allgather_object
from datasvc.trainer.optim.outer_optimizer import OuterOptimizer, group_alike
from datasvc.trainer.optim.parameter_names import next_number, parameters_of
from datasvc.trainer.optim.sync_policy import SyncPolicy, cut_fragments, neighbours, parse_sync
from datasvc.trainer.optim.tournament import Judge, Tournament

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def Averaging(  # noqa: N802 - beside `DistributedOptimizer`
    optimizer: Opt,
    sync: str,
    *,
    judge: Judge | None = None,
    buffers: Iterable[Tensor] = (),
    seed: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Opt:
    """Return the optimizer with steps of its own on each rank, and rounds in which the ranks average their weights.

    All ranks must have the same weights at the first step, see `broadcast_parameters`, and make the same number of
    steps, with DiLoCo of rounds. Only trainable parameters are averaged: no buffers, and no state of the optimizer.
    Evaluate and save after a round of all ranks (`optimizer.is_averaged`), or with EASGD and DiLoCo after any step in
    `with optimizer.outer_weights():`. The state of each rank is its own; the part "averaging" of `state_dict()` has
    the number of steps, and the center of EASGD or, of DiLoCo, outer weights and momenta, the residuals of the codec
    and the round in progress. With unequal delays, load a state only between rounds.

    Ranks in different rounds get a HorovodInternalError that names both, as do ranks that begin EASGD or DiLoCo with
    different weights: no round would make these equal. There is no error, and ranks wait for each other, if with
    "hierarchical" one is in a round of its node and one in a round of all, or if one has a codec and one has none.

    Several ranks may have one replica of a model together. Then each averages with the ranks that have the same parts
    of the other replicas, its `process_set`. Of a sharded parameter (DTensor) these are the local parts.

    Args:
        optimizer: an optimizer of torch, not one of `DistributedOptimizer`.
        sync: "local:8": the mean of all ranks every 8 steps; "postlocal:100:8": in each of the first 100 steps, then
            every 8; "hierarchical:2,8": the mean of the ranks of a node every 2 steps, of all ranks every 8;
            "easgd:8:0.9": elastic averaging with a center every 8 steps, beta 0.9; "diloco:32": the mean change of 32
            steps is the gradient of an outer step (Nesterov, rate 0.7, momentum 0.9);
            "diloco:32:fragments=4,delay=2,alpha=0.5,codec=int8" is Streaming DiLoCo: each of 4 parts of the
            parameters has a round every 32 steps, one after the other; a rank sends 2 steps before its weights
            change; they become 0.5 of the outer weights and 0.5 of its own; and it sends quantised numbers. With
            DiLoCo each rank may have its own number of steps and its own delay. "gossip:ring", "gossip:exponential",
            "gossip:ring:4": the mean with neighbours in every, or every 4th, step; "gossip:ring:4:fragments=4": of
            one of 4 parts in each step; "tournament:8": no mean: every 8 steps the loser of each pair of ranks takes
            over weights and state of the winner, see `Tournament`; "tournament:8:perturb=1.2": the learning rates of
            the ranks differ too, by powers of 1.2.
        judge: of a tournament, returns the loss of the model's present weights on held-out samples, the same samples
            on all ranks. It must leave weights, gradients and random generators as they are.
        buffers: of a tournament, tensors that a loser takes over too, such as `model.buffers()`.
        seed: of a tournament, the seed of pairs and rates, equal on all ranks.
        process_set: ranks that average with this one, which all have tensors of the same shapes; not of a tournament.

    Raises:
        ValueError: `sync` has another form, or is a tournament without `judge` or with a process set; the trainer is
            not initialized; the optimizer is one of `DistributedOptimizer` or of this function; this rank is not in
            the set; there are fewer parameters than fragments; or with "hierarchical", nodes have unequal numbers of
            ranks of a set.
    """
    policy = parse_sync(sync)
    if (policy.kind == "tournament") != (judge is not None):
        raise ValueError(
            f"sync is {sync!r}, and judge= is for tournaments only"
            if judge is not None
            else f"sync {sync!r} needs judge=: a function without arguments that returns the loss of the model's "
            "present weights on held-out samples, the same samples on all ranks"
        )
    if not runtime.is_initialized():
        raise ValueError("the trainer is not initialized; call init() first")
    if hasattr(optimizer, "backward_passes_per_step"):
        raise ValueError("this optimizer combines gradients already; give Averaging the optimizer of torch")
    if hasattr(optimizer, "sync_policy"):
        raise ValueError("this optimizer averages weights already; give Averaging the optimizer of torch")
    process_set.rank()  # raises
    if judge is not None and process_set is not global_process_set:
        raise ValueError(f"sync is {sync!r}, a tournament, which all ranks play; leave out process_set=")
    wrapped: _AveragingOptimizer = wrap_optimizer(optimizer, _AveragingOptimizer)
    _cut_fragments(wrapped, policy)  # may raise
    wrapped.set_up(policy, sync, process_set)
    if judge is not None:
        wrapped.tournament = Tournament(policy, judge, buffers, seed, f"tournament.{next_number('tournament')}")
    return cast("Opt", wrapped)  # an instance of a subclass of its class


class _AveragingOptimizer(torch.optim.Optimizer):
    """The methods that `wrap_optimizer` adds."""

    tournament: Tournament | None = None
    _is_leased = False
    _has_ended_round: bool | None = None  # of leases; None: there was none yet

    def set_up(self, policy: SyncPolicy, sync: str, process_set: ProcessSet) -> None:
        """Initialize the added attributes. Every rank calls this, in the same order."""
        self.sync_policy = policy
        self._sync = sync
        self._set = process_set
        self.num_steps = 0
        self._name = f"averaging.{next_number('averaging')}"
        self._outer: OuterOptimizer | None = None
        self._outer_parameters: list[Tensor] = []  # those that `_outer` has weights of
        self._node = _node_set(process_set) if policy.kind == "hierarchical" else process_set

    @property
    def is_averaged(self) -> bool:
        """Whether the last step ended with a round of all ranks, after which their weights are equal.

        After a round of EASGD, of gossip, and of DiLoCo with fragments or alpha, they are closer, and not equal;
        after a tournament, those of a loser and its winner are equal.
        """
        if self._has_ended_round is not None:
            return self._has_ended_round
        is_equal_round = self.sync_policy.gives_equal_weights and self.sync_policy.is_round(self.num_steps)
        return is_equal_round and (self._outer is None or self._outer.has_changed_weights)

    @contextlib.contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Give the parameters the weights to evaluate and save, equal on all ranks, and then their own again.

        These are the outer weights of DiLoCo, the center of EASGD, or those, with buffers, of the winner of a
        comparison of all ranks, for which every rank must call this. The block must not make steps.

        Raises:
            ValueError: the policy has no such weights.
        """
        if self.tournament is not None:
            with self.tournament.winner_weights(_weights_of(self), f"after {self._round_text()}"):
                yield
            return
        if self.sync_policy.kind not in ("easgd", "diloco"):
            raise ValueError(f"sync {self._sync!r} has no outer weights; evaluate when `is_averaged` is true")
        if self._outer is None:
            yield  # before the first step the weights of all ranks are equal
            return
        self._check_parameters()
        weights = _weights_of(self)
        own = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            torch._foreach_copy_(weights, self._outer.weights)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, own)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a local step, then the round that is due after it."""
        weights = _weights_of(self)
        self._begin_outer()
        if self._outer is not None:
            self._check_parameters()
            self._outer.before_step(self.num_steps)
        with contextlib.nullcontext() if self.tournament is None else self.tournament.scaled_rates(self.param_groups):
            # Do not call step(None), because the step of some optimizers takes no argument.
            loss = super().step(closure) if closure is not None else super().step()
        if self._is_leased:
            self._has_ended_round = False
            return loss
        self.num_steps += 1
        with torch.no_grad():
            if self.sync_policy.kind == "diloco" and self._outer is not None:
                self._outer.after_step(self.num_steps, weights)
            elif self.sync_policy.is_round(self.num_steps):
                self._average(weights)
            elif self.sync_policy.is_node_round(self.num_steps):
                self._replace_by_mean(weights, self._node)
        return loss

    def _begin_outer(self) -> None:
        if self._outer is None and self.sync_policy.kind in ("easgd", "diloco"):
            self._outer = self._new_outer()
            self._outer_parameters = _averaged_parameters(self)

    def lease_rounds(self, *, is_averaged: bool | None = None) -> None:
        """Let rounds end with `end_round` only: each rank makes as many steps in them as its lease has batches.

        The policy must be "local" or "diloco", without fragments, delay and alpha. `is_averaged`: whether all ranks
        have the same weights now; None: the number of steps tells, unless such rounds were before.
        """
        self._is_leased = True
        self._has_ended_round = is_averaged

    @torch.no_grad()
    def end_round(self, *, weight: float, num_steps: int) -> None:
        """Make a round of leases. Every rank calls this.

        Args:
            weight: share of this rank in the mean, times the number of ranks: 1 if all have equally many samples.
            num_steps: steps by which all ranks count this round, whatever number each has made: their mean.
        """
        assert self._is_leased, "call lease_rounds() first"
        self._begin_outer()  # this rank may have made no step yet
        self.num_steps += num_steps
        weights = _weights_of(self)
        if self._outer is None:
            self._replace_by_mean(weights, self._set, weight=weight)
        else:
            self._outer.make_round(self.num_steps, weights, weight=weight)
        self._has_ended_round = True

    def end_leases(self) -> None:
        """Let rounds end after the steps of the policy again. Call this after `end_round`."""
        self._is_leased, self._has_ended_round = False, None

    # This attribute prevents profiling and user hooks by torch: the step() of the base class has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, with this rank's part of the averaging."""
        return {**super().state_dict(), "averaging": self.shared_memory()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. One of a plain optimizer starts the averaging at step 0. Every rank calls this.

        Raises:
            ValueError: the state is from the middle of a round of another `sync`.
        """
        averaging = state_dict.get("averaging", {"num_steps": 0, "outer": None})
        outer = self._make_outer(averaging)  # may raise
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "averaging"})
        self._continue(averaging, outer)

    def shared_memory(self) -> dict[str, Any]:
        """Return this rank's part of the averaging: the number of steps, outer weights and momenta, and the round.

        `broadcast_optimizer_state` sends it.
        """
        outer = None if self._outer is None else self._outer.state_dict()
        averaging: dict[str, Any] = {"sync": self._sync, "num_steps": self.num_steps, "outer": outer}
        if self.tournament is not None:
            averaging["tournament"] = self.tournament.state_dict()
        return averaging

    def adopt_shared_memory(self, memory: dict[str, Any]) -> None:
        """Replace this rank's part of the averaging by that of another rank. Every rank calls this.

        Of the residuals of a codec, only those of that rank are left.
        """
        self._continue(memory, self._make_outer(memory))

    def _make_outer(self, averaging: dict[str, Any]) -> OuterOptimizer | None:
        if averaging["outer"] is None:
            return None
        if averaging["outer"]["changes"] and parse_sync(averaging["sync"]) != self.sync_policy:
            raise ValueError(
                f"the state is from the middle of a round of sync {averaging['sync']!r}: continue with that, or load "
                f"a state from the end of a round to continue with {self._sync!r}"
            )
        outer = self._new_outer()
        outer.load_state_dict(averaging["outer"])
        return outer

    def _continue(self, averaging: dict[str, Any], outer: OuterOptimizer | None) -> None:
        if self._outer is not None:
            self._outer.drop()
        if self.tournament is not None:
            self.tournament.load_state_dict(averaging.get("tournament"))
        self.num_steps, self._outer = averaging["num_steps"], outer
        self._outer_parameters = _averaged_parameters(self)

    def _check_parameters(self) -> None:
        """Raise ValueError if the trainable parameters are no longer those that the outer weights belong to."""
        now = _averaged_parameters(self)
        had, has = ([id(parameter) for parameter in each] for each in (self._outer_parameters, now))
        if had != has:
            raise ValueError(
                f"sync {self._sync!r} has outer weights of {len(had)} parameters, but other ones, {len(has)}, are "
                "trainable now: freeze and add parameters before the first step, or end a round and wrap the "
                "optimizer of torch again"
            )

    def _new_outer(self) -> OuterOptimizer:
        fragments = _cut_fragments(self, self.sync_policy)
        return OuterOptimizer(_weights_of(self), self.sync_policy, self._name, fragments, self._set)

    def _average(self, weights: list[Tensor]) -> None:
        if self.tournament is not None:
            self.tournament.play(self.num_steps, self, weights, self._round_text())
        elif self.sync_policy.kind == "gossip":
            self._mix(weights)
        elif self._outer is None:
            self._replace_by_mean(weights, self._set)
        else:
            self._pull(weights, self._outer)

    def _pull(self, weights: list[Tensor], outer: OuterOptimizer) -> None:
        """Move the weights by beta / ranks of their difference to the center, and the center by beta of the mean."""
        center = outer.weights
        differences = [weight - middle for weight, middle in zip(weights, center, strict=True)]
        torch._foreach_sub_(weights, differences, alpha=self.sync_policy.beta / self._set.size())
        self._replace_by_mean(differences, self._set, text=outer.compared_text(self._round_text()))
        torch._foreach_add_(center, differences, alpha=self.sync_policy.beta)

    def _replace_by_mean(
        self, tensors: list[Tensor], process_set: ProcessSet, *, weight: float = 1.0, text: str | None = None
    ) -> None:
        sent = []
        for parts in _group(tensors):
            flat = pack(parts)
            if weight != 1:
                flat.mul_(weight)
            flat.div_(process_set.size())
            handle = submit_allreduce(
                [flat],
                [flat],
                name=f"{self._name}.mean",
                op=ReduceOp.SUM,
                is_grouped=True,
                process_set=process_set,
                layout=layout_of(parts),
                round=text or self._round_text(),
            )
            handle.wait()
            sent.append((flat, parts))
        # If a rank is lost before all have arrived, the weights are those before the round.
        for flat, parts in sent:
            unpack(flat, parts)

    def _mix(self, weights: list[Tensor]) -> None:
        policy, size = self.sync_policy, self._set.size()
        turn, fragment = divmod(policy.last_round(self.num_steps), policy.fragments)
        to = neighbours(policy.graph, size, self._set.rank(), turn)
        splits = [int(rank in to) for rank in range(size)]
        for parts in _group([weights[position] for position in _cut_fragments(self, policy)[fragment]]):
            flat = pack(parts)
            copies = flat.expand(len(to), -1).contiguous()
            handle = submit_alltoall(
                copies,
                splits,
                name=f"{self._name}.mix",
                process_set=self._set,
                layout=layout_of(parts),
                round=self._round_text(),
            )
            received = cast("Tensor", handle.wait())
            unpack((flat + received.sum(0)) / (len(received) + 1), parts)

    def _round_text(self) -> str:
        return f"step {self.num_steps} of {self._sync}"


def _weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what this rank has of the parameters that are averaged, as views without gradient."""
    weights: list[Any] = [parameter.detach() for parameter in _averaged_parameters(optimizer)]
    # Only a DTensor has this method. Its class is not imported, because that takes longer than all of this package.
    return [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]


def _averaged_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def _cut_fragments(optimizer: torch.optim.Optimizer, policy: SyncPolicy) -> list[range]:
    # By the sizes of whole parameters: those of the local parts differ between the ranks of a replica.
    return cut_fragments([parameter.numel() for parameter in _averaged_parameters(optimizer)], policy.fragments)


def _group(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [list(group.values()) for group in group_alike(dict(enumerate(tensors)))]


def _node_set(process_set: ProcessSet) -> ProcessSet:
    """Return the process set of the ranks of a set that are on this node. Every rank calls this, with its set.

    Raises:
        ValueError: nodes have unequal numbers of ranks of a set.
    """
    nodes: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank, (members, node) in enumerate(allgather_object((process_set.ranks, runtime.cross_rank()))):
        nodes.setdefault((tuple(members), node), []).append(rank)
    sizes = {(members, len(ranks)) for (members, _), ranks in nodes.items()}
    if len(sizes) > len({members for members, _ in sizes}):
        raise ValueError('sync "hierarchical" needs nodes with equal numbers of ranks; use "local"')
    return add_process_sets(nodes.values())

"""The optimizer of a rank that has a part of the model; its state has the form of the whole model's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from datasvc.trainer.recipes.layouts.shard import from_local


class LayoutOptimizer:
    """An optimizer over the parameters of this rank.

    A state has the numbers that the parameters have in an optimizer of the whole model, so that it fits every layout.
    The state of a parameter has the placement of the parameter.

    Args:
        optimizer: optimizer over the parameters of `model`, with the groups of `group_names`, in this order. A group
            may be empty.
        model: parameters of this rank, with the names of the whole model.
        group_names: names of the whole model's parameters, by group.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, group_names: Sequence[Sequence[str]]
    ) -> None:
        self._optimizer: Any = optimizer
        self._states: Any = optimizer.state
        self._group_names = group_names
        numbers = {name: number for number, name in enumerate(name for group in group_names for name in group)}
        self._parameters = {
            numbers[name]: parameter for name, parameter in model.named_parameters() if name in numbers
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of this rank's parameters, with their settings; changes apply."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def states(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """State of each parameter that this rank updates, as the optimizer keeps it."""
        return cast("Mapping[nn.Parameter, Mapping[str, Any]]", self._states)

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        """Return at once: the gradients are summed in the backward pass."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect; see `synchronize`."""
        return contextlib.nullcontext()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this rank."""
        return self._optimizer.step(closure) if closure is not None else self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state of an optimizer of the whole model; tensors are not copied."""
        state = {
            number: dict(self._states[parameter])
            for number, parameter in self._parameters.items()
            if self._states.get(parameter)
        }
        groups, start = [], 0
        for group, names in zip(self.param_groups, self._group_names, strict=True):
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {"state": state, "param_groups": groups}

    def make_state(self, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[int, dict[str, Any]]:
        """Return tensors that a restore fills with the stored state of this rank's parameters, for `load_state_dict`.

        Args:
            stored: dtype and shape of the tensors of a whole state, by number of the parameter and name, such as
                "3.exp_avg".
        """
        state: dict[int, dict[str, Any]] = {}
        for path, (dtype, shape) in stored.items():
            number, _, name = path.partition(".")
            parameter = self._parameters.get(int(number)) if number.isdecimal() else None
            if parameter is not None:
                is_like_parameter = shape == tuple(parameter.shape) and shape
                state.setdefault(int(number), {})[name] = (
                    torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    if is_like_parameter
                    else torch.zeros(shape, dtype=dtype, device="cpu")
                )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of an optimizer of the whole model, whatever layout has saved it.

        The tensors of `state`, such as those of `make_state`, are not copied. A plain tensor with the shape of this
        rank's part of a sharded parameter is that part.

        Raises:
            ValueError: the state has another number of groups, or of parameters in a group.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        expected = [len(names) for names in self._group_names]
        if sizes != expected:
            raise ValueError(f"the state has groups of {sizes} parameters, the model has groups of {expected}")
        for number, parameter in self._parameters.items():
            # JSON has no numbers as keys, so a state from a checkpoint may have strings.
            saved = state["state"].get(number, state["state"].get(str(number)))
            if saved is not None:
                self._states[parameter] = {name: from_local(value, parameter) for name, value in saved.items()}
        for group, saved_group in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})


class AveragingLayoutOptimizer(LayoutOptimizer):
    """An optimizer of the parameters of this rank, that averages them with the same parts of other replicas.

    It takes one of `hvd.Averaging`. A state also has "averaging", this rank's part of it.
    """

    is_averaged = property(attrgetter("_optimizer.is_averaged"))
    sync_policy = property(attrgetter("_optimizer.sync_policy"))
    num_steps = property(attrgetter("_optimizer.num_steps"))
    lease_rounds = property(attrgetter("_optimizer.lease_rounds"))
    end_round = property(attrgetter("_optimizer.end_round"))
    end_leases = property(attrgetter("_optimizer.end_leases"))
    tournament = None  # only ranks with the whole model play one

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, with this rank's part of the averaging."""
        return {**super().state_dict(), "averaging": self._optimizer.shared_memory()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; without "averaging", rounds begin. Every rank calls this.

        Raises:
            ValueError: as in the base class; or the state is from the middle of a round of another `sync`.
        """
        super().load_state_dict(state)
        self._optimizer.adopt_shared_memory(state.get("averaging", {"num_steps": 0, "outer": None}))


class ZeroOptimizer(LayoutOptimizer):
    """An optimizer whose state is divided over ranks that each have the whole model (ZeRO-1).

    Args:
        optimizer: optimizer of the parameters of one rank, from their groups; called once.
        model: whole model.
        group_names: names of the model's parameters, by group.
        groups: parameter groups.
        rate: learning rate until the first change.
        process_group: ranks that divide the state. Each updates its parameters and sends them to the others.
        wrap: makes an optimizer that sums the gradients over the ranks, from the optimizer.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        model: nn.Module,
        group_names: Sequence[Sequence[str]],
        *,
        groups: list[dict[str, Any]],
        rate: float,
        process_group: dist.ProcessGroup,
        wrap: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        # Only here: it compiles functional copies of eight optimizers.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # torch calls `optimizer` with the groups of this rank's parameters.
        zero: Any = ZeroRedundancyOptimizer(groups, cast("Any", optimizer), process_group=process_group, lr=rate)
        super().__init__(zero, model, group_names)
        self._optimizer = wrap(zero)
        self._states = zero.optim.state
        own = {parameter for group in zero.optim.param_groups for parameter in group["params"]}
        self._parameters = {number: each for number, each in self._parameters.items() if each in own}

    # What `DistributedOptimizer` reports of its buckets.
    bucket_bytes = property(attrgetter("_optimizer.bucket_bytes"))
    all_reduce_cost = property(attrgetter("_optimizer.all_reduce_cost"))
    is_choosing_buckets = property(attrgetter("_optimizer.is_choosing_buckets"))

    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are summed."""
        self._optimizer.synchronize()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `step` takes the gradients as they are."""
        context: contextlib.AbstractContextManager[None] = self._optimizer.skip_synchronize()
        return context

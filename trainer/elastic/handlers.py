"""The elastic state of a training with torch, and the handlers of its values that are not plain attributes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from datasvc.trainer.elastic.sampler import ElasticLoader, ElasticSampler
from datasvc.trainer.elastic.state import ObjectState
from datasvc.trainer.optim.broadcast_state import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Base class of handlers, each of which owns one value of a state; see `set_handler_registry`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save a copy of the value in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the value from the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the value of rank 0 to all ranks. Every rank calls this; the state calls `save` afterwards."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the value to a new rank and size. By default there is nothing to adapt."""

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handler for objects with `state_dict` and `load_state_dict`, such as schedulers and averaged weights.

    The state must be the same on every rank, and picklable.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Save a copy of the state."""
        # A deep copy, because `state_dict` refers to tensors that the training changes in place.
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the saved copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelHandler(StateDictHandler):
    """Handler for `torch.nn.Module`: parameters and buffers, in place."""

    value: torch.nn.Module

    def sync(self) -> None:
        """Overwrite the tensors with those of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerHandler(StateDictHandler):
    """Handler for `torch.optim.Optimizer`, plain or distributed."""

    value: torch.optim.Optimizer

    def sync(self) -> None:
        """Copy the state and the options of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)


class GradScalerHandler(StateDictHandler):
    """Handler for `torch.amp.GradScaler`, whose `state_dict` does not contain the progress of the current step."""

    value: torch.amp.GradScaler

    def restore(self) -> None:
        """Load the saved copy, and discard the interrupted step, so that the next step can unscale its gradients."""
        super().restore()
        self.reset()

    def reset(self) -> None:
        """Discard the interrupted step. After a change of hosts, `reset` is called without `restore`."""
        if self.value.is_enabled():
            self.value._per_optimizer_states.clear()  # noqa: SLF001 - the public update() clears it only after a complete step


class SamplerHandler(StateDictHandler):
    """Handler for `ElasticSampler` and `ElasticLoader`: their state is that of the whole job, not of one rank."""

    value: ElasticSampler | ElasticLoader[Any]

    def reset(self) -> None:
        """Distribute the remaining samples over the current ranks."""
        self.value.reset()


# Horovod's names.
ModelStateHandler, OptimizerStateHandler, SamplerStateHandler = ModelHandler, OptimizerHandler, SamplerHandler

Registry = Sequence[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelHandler),
    (torch.optim.Optimizer, OptimizerHandler),
    (torch.amp.GradScaler, GradScalerHandler),
    (ElasticSampler, SamplerHandler),
    (ElasticLoader, SamplerHandler),
]


def get_handler_registry() -> Registry:
    """Return pairs of a type and its handler class; the first matching type is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs of types and handler classes, for states that are created later."""
    global _registry  # noqa: PLW0603 - Horovod's interface
    _registry = registry


def choose_handler(value: Any) -> StateHandler | None:
    """Return a new handler for a value; None for a plain attribute, because `ObjectState` copies such a value."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    # Exclude classes: a class has both methods too, but only its instances have a state.
    if not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StateDictHandler(value)
    return None


class TorchState(ObjectState):
    """The shared state of the ranks, such as `TorchState(model, optimizer, loader=loader, epoch=0)`.

    Each argument becomes an attribute. Models, optimizers, `ElasticSampler`, `ElasticLoader` and other objects with
    `state_dict` and `load_state_dict` are saved by means of these methods; all other values are copied. Create the
    state after `init`, in the same way on every rank.

    Args:
        model: model, or None.
        optimizer: optimizer, or None.
        kwargs: other values by name.
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: choose_handler(value) for name, value in values.items()}
        # Written to __dict__, because __setattr__ reads `_handlers`, which does not exist before this line.
        self.__dict__["_handlers"] = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            self.__dict__[name] = handler.value
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})

    def save(self) -> None:
        """Save copies of all values in memory; tensors stay on their device."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore all values from the copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copy all values of rank 0, and save them. Every rank calls this."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()  # calls `save`, which also saves the values of the handlers

    def reset(self) -> None:
        """Adapt the values to the new rank and size, such as samplers and loaders."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

"""The elastic state of a training with torch: model, optimizer, loader or sampler, and plain attributes."""

from __future__ import annotations

from typing import Any

import torch

from datasvc.trainer.elastic.handlers import StateHandler, choose_handler
from datasvc.trainer.elastic.state import ObjectState


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

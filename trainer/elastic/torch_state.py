"""The state of a training with torch: model, optimizer, loader or sampler, and plain attributes."""

from __future__ import annotations

from typing import Any

import torch

from datasvc.trainer.elastic.handlers import StateHandler
from datasvc.trainer.elastic.registry import choose_handler
from datasvc.trainer.elastic.state import ObjectState


class TorchState(ObjectState):
    """What the ranks have in common: `TorchState(model, optimizer, loader=loader, epoch=0)`.

    Each value is an attribute under its name. Models, optimizers, an `ElasticSampler`, an `ElasticLoader` and
    whatever has `state_dict` and `load_state_dict` are saved by these; others are copied. Made after `init`, on
    every rank alike.

    Args:
        model: may be None.
        optimizer: may be None.
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
        found = {name: choose_handler(value) for name, value in values.items()}
        # Not by way of __setattr__, which asks for it.
        self.__dict__["_handlers"] = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            self.__dict__[name] = handler.value
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})

    def save(self) -> None:
        """Keeps copies of everything in memory: on the GPU for what is there."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Goes back to the copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Makes everything equal to rank 0's, and saves it. Every rank calls this."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapts samplers and loaders to the new rank and size."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

"""The registry of state handlers, by the type of the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from datasvc.trainer.elastic.elastic_loader import ElasticLoader
from datasvc.trainer.elastic.elastic_sampler import ElasticSampler
from datasvc.trainer.elastic.handlers import (
    GradScalerHandler,
    ModelHandler,
    OptimizerHandler,
    SamplerHandler,
    StateDictHandler,
    StateHandler,
)

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
    """Replace the pairs of types and handler classes; affects states that are created afterwards."""
    global _registry  # noqa: PLW0603 - Horovod's interface
    _registry = registry


def choose_handler(value: Any) -> StateHandler | None:
    """Return the handler for a value; None for a plain attribute."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    # A class has the methods too, but no state of its own.
    if not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StateDictHandler(value)
    return None

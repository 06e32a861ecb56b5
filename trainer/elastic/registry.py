"""Which handler takes which kind of value of a `TorchState`."""

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
    ShareHandler,
    StateDictHandler,
    StateHandler,
)

Registry = Sequence[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelHandler),
    (torch.optim.Optimizer, OptimizerHandler),
    (torch.amp.GradScaler, GradScalerHandler),
    (ElasticSampler, ShareHandler),
    (ElasticLoader, ShareHandler),
]


def get_handler_registry() -> Registry:
    """Pairs of a type and its handler; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replaces the pairs, for states that are made from now on."""
    global _registry  # noqa: PLW0603 - Horovod's interface
    _registry = registry


def choose_handler(value: Any) -> StateHandler | None:
    """The handler for a value; None for one that is an attribute and no more."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StateDictHandler(value)
    return None

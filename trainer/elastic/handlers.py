"""How `TorchState` saves, restores and synchronizes each kind of value."""

from __future__ import annotations

import copy
from typing import Any

import torch

from datasvc.trainer.elastic.elastic_loader import ElasticLoader
from datasvc.trainer.elastic.elastic_sampler import ElasticSampler
from datasvc.trainer.optim.broadcast_state import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Base of handlers. Subclasses say how; an own one is made known by `set_handler_registry`.

    Args:
        value: the first.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Makes the value what it was when saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the value equal to rank 0's. Every rank calls this; a `save` follows once all values are."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the value to a new rank and size."""

    def set_value(self, value: Any) -> None:
        """Takes another value, and saves it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """For whatever has `state_dict` and `load_state_dict`: schedulers, loss scalers, averaged weights.

    The state must be the same on every rank and travel as a pickle.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copies the state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Loads the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Loads rank 0's state."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelHandler(StateDictHandler):
    """For `torch.nn.Module`: parameters and buffers, in place."""

    value: torch.nn.Module

    def sync(self) -> None:
        """Overwrites the tensors with rank 0's."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerHandler(StateDictHandler):
    """For `torch.optim.Optimizer`, distributed or not."""

    value: torch.optim.Optimizer

    def sync(self) -> None:
        """Takes over rank 0's state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class GradScalerHandler(StateDictHandler):
    """For `torch.amp.GradScaler`, whose state lacks how far the step under way has come."""

    value: torch.amp.GradScaler

    def restore(self) -> None:
        """Loads the copy, and forgets the step under way: the next gradients are scaled again."""
        super().restore()
        self._forget_step()

    def reset(self) -> None:
        """Forgets the step under way, also when nothing was restored."""
        self._forget_step()

    def _forget_step(self) -> None:
        if self.value.is_enabled():
            self.value._per_optimizer_states.clear()  # noqa: SLF001 - only update() does, after a whole step


class ShareHandler(StateDictHandler):
    """For `ElasticSampler` and `ElasticLoader`: their state is the job's, their share the rank's."""

    value: ElasticSampler | ElasticLoader[Any]

    def reset(self) -> None:
        """Takes this rank's share of what is left."""
        self.value.reset()


# Horovod's names.
ModelStateHandler, OptimizerStateHandler, SamplerStateHandler = ModelHandler, OptimizerHandler, ShareHandler

"""Accelerate: versions of a model in place of `accelerator.save_state` and `load_state`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.integrations.run_checkpoints import RANK_STATE, RunCheckpoints

with explain_missing("datasvc.integrations.accelerate"):
    import accelerate
    import torch

__all__ = ["AcceleratorVersions"]

_SCALER = "scaler"
_logger = logging.getLogger(__name__)


class AcceleratorVersions:
    """Saves and restores the objects of a run on an `Accelerator`, while the training goes on.

    Use it as a context manager. Every rank makes one and calls the same methods. Do not prepare a loader of datasvc,
    which divides the samples among the ranks itself; `skip_first_batches` is not needed.

    Args:
        objects: models, optimizers, schedules and others with `state_dict` and `load_state_dict`, by the name that
            they have in a version; prepared or not.
        loader: loader of datasvc for the training data; its position and the consumed samples are saved too. None:
            another loader is used.
        **options: see `RunCheckpoints`.

    Attributes:
        checkpoints: the versions of the run: `version`, `newest()`, `stop_signal`.

    Raises:
        ConfigError: the run shards its models; `datasvc.models.dcp` saves such models.
    """

    def __init__(
        self,
        accelerator: Any,
        repo: DataRepository,
        name: str,
        objects: Mapping[str, Any],
        *,
        loader: Any = None,
        **options: Any,
    ) -> None:
        kinds = accelerate.DistributedType
        if accelerator.distributed_type in {kinds.FSDP, kinds.DEEPSPEED, kinds.MEGATRON_LM}:
            raise ConfigError(
                f"{accelerator.distributed_type.value} shards the models, and AcceleratorVersions saves models that "
                "every rank has as a whole; save with datasvc.models.dcp"
            )
        self._accelerator, self._objects, self._loader = accelerator, dict(objects), loader
        self.checkpoints = RunCheckpoints(repo, name, **options)

    def __enter__(self) -> Self:
        self.checkpoints.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.checkpoints.close(error)

    @property
    def stop_signal(self) -> int | None:
        """Number of the signal for which all ranks have agreed to end the run; None: continue."""
        return self.checkpoints.stop_signal

    def restore(self, ref: str | None = None) -> int:
        """Load a version, every byte verified, and return its step; 0 if the model has no version.

        Call it once before the training, also if there is no version: the consumed samples are counted from here.

        Args:
            ref: a version or tag of any model; None: the newest version of this model.

        Raises:
            ConfigError: the version lacks one of the objects.
        """
        found = self.checkpoints.open().restore(ref, default=None)
        step = 0
        if found is not None:
            state, step = found.state, found.entry["step"]
            targets = self._targets()
            missing = sorted(targets.keys() - state.keys())
            if missing:
                raise ConfigError(
                    f"{found.version} has no {', '.join(missing)}; it has {', '.join(sorted(state))}: give the names "
                    "of the objects that it was saved with"
                )
            for name, target in targets.items():
                target.load_state_dict(state[name])
            self._accelerator.step = 0  # micro-batches since a complete step: versions are saved after one
            self.checkpoints.load_position(self._loader, state)
            ranks = self._accelerator.process_index, self._accelerator.num_processes
            self.checkpoints.reinstate(state.get(RANK_STATE), *ranks)
        self.checkpoints.begin(self._loader, step=step)
        return step

    def step(self, step: int, *, metrics: Mapping[str, Any] | None = None, is_last: bool = False) -> None:
        """Save if it is time. Call it after each optimizer step; `stop_signal` then says whether to end the run.

        It may be called after each micro-batch of `accelerator.accumulate`, too. A version has no gradients, so a
        save that is due, or a signal, waits until the optimizer step is complete.

        Args:
            step: number of optimizer steps so far, or of micro-batches.
            metrics: metric values by name, numbers or tensors of one element.
            is_last: save in any case. Gradients of an incomplete step are lost then, with a warning.
        """
        # Without `accumulate`, the count stays 0, and `sync_gradients` may be that of an earlier accelerator.
        is_complete = self._accelerator.step == 0 or self._accelerator.sync_gradients
        if is_last and not is_complete:
            _logger.warning(
                "the last save, at step %d, is in the middle of an accumulation of %d micro-batches: the version "
                "does not have their gradients, and a run that continues it does not train on them",
                step,
                self._accelerator.gradient_accumulation_steps,
            )
        if is_last or (is_complete and self.checkpoints.is_due(step)):
            state = {name: target.state_dict() for name, target in self._targets().items()}
            self.checkpoints.save(state, step=step, metrics=metrics)

    def _targets(self) -> dict[str, Any]:
        """Return the objects by name: models as they were before `prepare`, with the scaler of mixed precision."""
        unwrap = self._accelerator.unwrap_model
        targets = {
            name: unwrap(target) if isinstance(target, torch.nn.Module) else target
            for name, target in self._objects.items()
        }
        scaler = self._accelerator.scaler
        return targets if scaler is None else {**targets, _SCALER: scaler}

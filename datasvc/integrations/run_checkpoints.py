"""`RunCheckpoints`: the checkpoints of one run, for the adapters of training frameworks.

It adds to `CheckpointManager` what every framework needs: the random states of each rank, the consumed samples, and
the version that the run continues.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.models import CheckpointManager, ConsumptionTracker, ReadLoader
from datasvc.repository import Resolved

with explain_missing("datasvc.integrations"):
    import torch

    from datasvc.trainer.recipes.random_state import capture, reinstate

_logger = logging.getLogger(__name__)

LOADER = "loader"
RANK_STATE = "rank_state"
_RESTORE_OPTIONS: Final = ("cache", "peers", "fallback", "trusted_keys")


class RunCheckpoints:
    """Saves the state of a run as versions of a model. In a job of several ranks, every rank calls each method.

    Args:
        config: configuration of the run, JSON values, which each version keeps.
        **options: arguments of `repo.models.manager`, such as `every="10min"`, `max_stall="3%"`, `grace="30s"`; not
            `local`.

    Attributes:
        stop_signal: signal for which all ranks have agreed to end the run; None: continue.
    """

    def __init__(
        self, repo: DataRepository, name: str, *, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if options.get("local") is not None:
            raise ConfigError(
                "local= is not for the adapters of frameworks, which restore from the repository; use "
                "repo.models.manager(local=) in a training loop of your own"
            )
        self.repo, self.name = repo, name
        self._config, self._options = config, options
        self._manager: CheckpointManager | None = None
        self._tracker: ConsumptionTracker | None = None
        self._loader: ReadLoader | None = None
        self._version: Resolved | None = None  # when the manager was closed
        self._parent: str | None = None
        self._saved_step: int | None = None
        self.stop_signal: int | None = None

    @property
    def version(self) -> Resolved | None:
        """Newest version that this run committed or restored; None: none yet."""
        return self._version if self._manager is None else self._manager.version

    def newest(self) -> str | None:
        """Return the newest version of the model, such as "net@3"; None if it has none."""
        found = self.repo.repository.newest("models", self.name)
        return None if found is None else str(found)

    def open(self) -> CheckpointManager:
        """Return the manager, which is opened once the ranks have met: it takes over the signals for `grace`."""
        if self._manager is None:
            self._manager = self.repo.models.manager(self.name, **self._options)
        return self._manager

    def read(self, ref: str) -> dict[str, Any]:
        """Return the state of a version or tag, from the cache, the copies and with the signatures of the options."""
        options = {name: self._options[name] for name in _RESTORE_OPTIONS if name in self._options}
        state: dict[str, Any] = self.repo.models.restore(ref, **options).state
        return state

    def load_position(self, loader: object, state: Mapping[str, Any]) -> None:
        """Have a loader of datasvc continue at the position in a version's state, if it has one."""
        if isinstance(loader, ReadLoader) and LOADER in state:
            loader.load_state_dict(state[LOADER])  # type: ignore[attr-defined]  # every loader of datasvc has it

    def begin(self, loader: object, *, step: int, parent: str | None = None) -> None:
        """Start to record, after the states of a version are loaded.

        Args:
            loader: loader of the training data. If it is no `ReadLoader`, consumed samples are not recorded.
            step: number of optimizer steps that the weights have had.
            parent: version that the run continues; None: that of the manager.
        """
        self.open()
        self._loader = loader if isinstance(loader, ReadLoader) else None
        self._tracker = None if self._loader is None else ConsumptionTracker(self._loader, step=step)
        self._parent = parent
        # A run that does no step leaves the version that it continues as the newest.
        self._saved_step = None if (parent or self.version) is None else step

    def reinstate(self, states: Any, rank: int, world_size: int) -> None:
        """Set the random states of this rank to those of a version that as many ranks saved; others are ignored."""
        if states is not None and len(states) == world_size:
            reinstate(states[rank])

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`, the same on all ranks; see `CheckpointManager.should_save`."""
        manager = self.open()
        is_due = bool(manager.should_save(step))
        self.stop_signal = manager.stop_signal
        return is_due

    def save(
        self, state: Mapping[str, Any], *, step: int, metrics: Mapping[str, Any] | None = None, again: bool = False
    ) -> None:
        """Save in the background, with the loader's state and this rank's random states, unless `step` is saved.

        Args:
            state: state that all ranks share.
            step: number of optimizer steps so far.
            metrics: numbers or tensors of one element.
            again: save also if `step` is saved, because the state has changed without a step.
        """
        if step == self._saved_step and not again:
            return
        content = dict(state)
        if self._loader is not None:
            content[LOADER] = self._loader.state_dict()
        self.open().save(
            content,
            rank_state=capture(),
            step=step,
            data=() if self._tracker is None else [self._tracker.use()],
            config=self._config,
            metrics=metrics
            and {
                name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()
            },
            parent=self._parent,
        )
        self._saved_step, self._parent = step, None  # each version continues the one before
        _logger.info("step %d: newest version %s", step, self.version)

    def close(self, error: BaseException | None = None) -> None:
        """Wait until all versions are committed. For errors see `CheckpointManager.close`.

        Args:
            error: error that ends the run; a failed save is then logged, so that its error does not hide this one.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(None, error, None)
            self._version = manager.version


def is_reference(path: Any) -> bool:
    """Return whether a checkpoint path is NAME@VERSION or NAME@TAG. A file that exists is a file."""
    return path is not None and "@" in str(path) and "/" not in str(path) and not Path(path).exists()

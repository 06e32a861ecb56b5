"""Ray Train: reports and checkpoints that name model versions, for functions that `ray.train` runs on its workers.

A checkpoint of Ray has one small file, which names the version; the weights are in the repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.integrations.run_checkpoints import RANK_STATE, RunCheckpoints
from datasvc.integrations.tracked_version import describe_reference, find_version
from datasvc.loaders import DataRanks
from datasvc.models.saving.save_policy import is_multiple_reached

with explain_missing("datasvc.integrations.ray_train"):
    import ray.train

__all__ = ["WorkerVersions", "ranks", "report_version", "version_of"]

_FILE: Final = "datasvc.json"


class WorkerVersions:
    """Saves the state of a training function as versions, and reports them to Ray Train.

    Use it as a context manager. Every worker makes one and calls the same methods; with several workers use a trainer
    that opens torch's process group, such as `ray.train.torch.TorchTrainer`. After the loss of a worker, Ray Train
    starts the function again on all workers, and `restore` returns the version that was reported last.

    Args:
        loader: loader of datasvc for the training data; its position and the consumed samples are saved too. None:
            another loader is used.
        report_every: steps from one report to the next, the same on all workers; saves are reported too. Ray Train
            takes one report every 2 s, and an earlier one stops the training until then, unless
            `RAY_TRAIN_HEALTH_CHECK_INTERVAL_S` is set where `fit` is called.
        **options: see `RunCheckpoints`; not `grace`, because Ray Train handles signals.

    Attributes:
        checkpoints: the versions of the run: `version`, `newest()`.
    """

    def __init__(
        self, repo: DataRepository, name: str, *, loader: Any = None, report_every: int = 100, **options: Any
    ) -> None:
        if "grace" in options:
            raise ConfigError("grace needs the main thread, and Ray Train runs the function in another; leave it out")
        if type(report_every) is not int or report_every < 1:
            raise ConfigError(f"report_every is {report_every!r}; expected a number of steps, at least 1")
        self._report_every, self._last_step = report_every, 0
        self.checkpoints = RunCheckpoints(repo, name, **options)
        self._repo, self._loader = repo, loader
        self._reported: str | None = None

    def __enter__(self) -> Self:
        self.checkpoints.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.checkpoints.close(error)

    def restore(self, ref: str | None = None) -> tuple[int, dict[str, Any] | None]:
        """Return the step and the state of the version to continue, every byte verified; (0, None) without one.

        Call it once before the training: the loader then continues at the version's position, the random states of
        this worker are set, and the consumed samples are counted from here.

        Args:
            ref: version to begin with until Ray Train has a checkpoint; None: the newest version of this model, if
                there is any. Later the version that the checkpoint names is restored.
        """
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            ref = self._reported = version_of(self._repo, checkpoint)
        found = self.checkpoints.open().restore(ref, default=None)
        if found is None:
            self.checkpoints.begin(self._loader, step=0)
            return 0, None
        state: dict[str, Any] = dict(found.state)
        self._last_step = found.entry["step"]
        self.checkpoints.load_position(self._loader, state)
        context = ray.train.get_context()
        self.checkpoints.reinstate(state.pop(RANK_STATE, None), context.get_world_rank(), context.get_world_size())
        self.checkpoints.begin(self._loader, step=found.entry["step"], parent=str(found.version))
        return found.entry["step"], state

    def report(
        self, state: Mapping[str, Any], *, step: int, metrics: Mapping[str, Any] | None = None, is_last: bool = False
    ) -> None:
        """Save if a save is due. Then, and every `report_every` steps, report metrics and the newest version.

        Every worker calls it after each optimizer step, or after each n-th one; Ray Train waits for all of them.

        Args:
            state: state that all workers share, such as `{"net": net.state_dict()}`.
            step: number of optimizer steps so far, the same on all workers.
            metrics: metric values by name, numbers or tensors of one element. Ray Train gets those of reported steps.
            is_last: save and report in any case, and wait for the commit. Without it, the last version is unreported.
        """
        is_due = self.checkpoints.is_due(step) or is_last
        if is_due:
            self.checkpoints.save(state, step=step, metrics=metrics)
        if is_last:
            self.checkpoints.open().wait()
        last, self._last_step = self._last_step, step
        if not is_due and not is_multiple_reached(self._report_every, last, step):
            return
        numbers = {name: float(value) for name, value in (metrics or {}).items()} | {"step": step}
        version = None if self.checkpoints.version is None else str(self.checkpoints.version)
        # Rank 0 decides: another rank may learn of a commit one step later.
        if version in {None, self._reported} or ray.train.get_context().get_world_rank() != 0:
            ray.train.report(numbers)
            return
        report_version(self._repo, str(version), numbers)
        self._reported = version


def ranks() -> DataRanks:
    """Return the rank and the number of this training's workers, for the `ranks=` of a loader."""
    context = ray.train.get_context()
    return DataRanks(context.get_world_rank(), context.get_world_size())


def report_version(repo: DataRepository, ref: str, metrics: Mapping[str, Any]) -> None:
    """Report metrics to Ray Train, with a checkpoint that names a model version.

    The other workers call `ray.train.report(metrics)`.

    Raises:
        NotFoundError: the version does not exist.
    """
    _, _, tags = describe_reference(repo, ref)
    with TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_text(json.dumps(tags, indent=1, sort_keys=True), encoding="utf-8")
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))


def version_of(repo: DataRepository, checkpoint: Any) -> str:
    """Return the model version, such as "net@3", that a checkpoint of Ray names, for `repo.models.restore`.

    Args:
        repo: repository of the version, or one that has a copy of it by push or pull.
        checkpoint: such as `result.checkpoint` of a trainer's `fit`.

    Raises:
        ConfigError: the checkpoint names no version, or `repo` does not have it.
    """
    with checkpoint.as_directory() as folder:
        path = Path(folder) / _FILE
        tags = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return find_version(repo, tags, f"the checkpoint {checkpoint.path}")

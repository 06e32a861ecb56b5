"""Experiment trackers to which rank 0 sends the metrics of a run: TensorBoard, Weights & Biases, MLflow.

A tracker's package is imported only if a run names it. A tracker gets the effective configuration once, then numbers
by name and step. Checkpoints keep the id of the tracker's run, so that a job that starts again continues this run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.models.versions.entry_fields import TRACKERS


class MetricLog(Protocol):
    """A destination of metrics.

    Attributes:
        run_id: id of the tracker's run, with which a later job continues it; None if the tracker needs none.
    """

    run_id: str | None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of the run after `step`."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardLog:
    """Writes event files to a folder, for `tensorboard --logdir FOLDER`.

    Args:
        folder: folder for the event files; created if missing.
        name: name of the model, and of the sub-folder that gets the files.
        config: configuration of the run.
        step: first step of this run; points that an earlier run wrote from this step on are hidden.
        run_id: run of the tracker to continue; None: a new one. Ignored here, because TensorBoard has no ids of runs.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        config: Mapping[str, Any],
        step: int,
        run_id: str | None = None,  # noqa: ARG002
    ) -> None:
        self.run_id: str | None = None
        _import_extra("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the points that a killed run logged after its last checkpoint.
        self._writer: Any = SummaryWriter(f"{folder}/{name}", purge_step=step)
        # TensorBoard shows text as Markdown, in which indented lines are a block of code.
        self._writer.add_text("config", "\n".join(f"    {key} = {value!r}" for key, value in config.items()), step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the files."""
        self._writer.close()


class WandbLog:
    """A run of a Weights & Biases project. See `TensorBoardLog` for the arguments; `project` replaces the folder."""

    def __init__(
        self,
        project: str,
        name: str,
        config: Mapping[str, Any],
        step: int,  # noqa: ARG002
        run_id: str | None = None,
    ) -> None:
        wandb = _import_extra("wandb")
        # Allow other values: a job that starts again may have other settings, such as more epochs.
        continued = {} if run_id is None else {"id": run_id, "resume": "allow", "allow_val_change": True}
        try:
            self._run = wandb.init(project=project, name=name, config=dict(config), **continued)
        except wandb.Error as error:
            raise _refused("wandb", project, run_id, error) from error
        self.run_id: str | None = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowLog:
    """A run of an MLflow experiment. See `TensorBoardLog` for the arguments; `experiment` replaces the folder."""

    def __init__(
        self,
        experiment: str,
        name: str,
        config: Mapping[str, Any],
        step: int,  # noqa: ARG002
        run_id: str | None = None,
    ) -> None:
        self._mlflow = _import_extra("mlflow")
        try:
            found = self._mlflow.set_experiment(experiment)
            if run_id is not None and self._mlflow.get_run(run_id).info.experiment_id != found.experiment_id:
                run_id = None  # the run is in another experiment: this one gets a run of its own
            if run_id is None:
                run = self._mlflow.start_run(run_name=name)
                self._mlflow.log_params(dict(config))
            else:
                # MLflow keeps the parameters of the first job: it refuses other values for them.
                run = self._mlflow.start_run(run_id=run_id)
        except self._mlflow.exceptions.MlflowException as error:
            raise _refused("mlflow", experiment, run_id, error) from error
        self.run_id: str | None = str(run.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


_KINDS: Final[Mapping[str, Callable[[str, str, Mapping[str, Any], int, str | None], MetricLog]]] = {
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}


def check_logs(targets: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Split targets such as "tensorboard:FOLDER" into the trackers' kinds and their places, by target.

    Raises:
        ConfigError: a target has another form, or a tracker of one active run in a process is named twice.
    """
    checked = {target: _split_target(target) for target in targets}
    kinds = [kind for kind, _ in checked.values()]
    for kind in TRACKERS:
        if kinds.count(kind) > 1:
            raise ConfigError(f"log_to names {kind} {kinds.count(kind)} times; a run has one run of {kind}: give one")
    return checked


def _split_target(target: str) -> tuple[str, str]:
    kind, _, place = target.partition(":")
    if kind not in _KINDS or not place:
        raise ConfigError(f"log_to is {target!r}; expected one of {', '.join(f'{name}:PLACE' for name in _KINDS)}")
    return kind, place


def open_logs(
    targets: Sequence[str], *, name: str, config: Mapping[str, Any], step: int, run_ids: Mapping[str, str]
) -> dict[str, MetricLog]:
    """Return the opened trackers of a run, by target.

    Args:
        targets: trackers, such as "wandb:PROJECT".
        name: name of the model.
        config: configuration of the run.
        step: first step of this run.
        run_ids: ids of the trackers' runs to continue, by kind, such as "wandb"; others get a new run.

    Raises:
        ConfigError: a tracker's package is not installed, or the tracker cannot start or continue a run.
    """
    return {
        target: _KINDS[kind](place, name, config, step, run_ids.get(kind))
        for target, (kind, place) in check_logs(targets).items()
    }


def import_trackers(targets: Sequence[str]) -> None:
    """Import the packages of the trackers of these targets. Raises ConfigError: one is not installed."""
    for kind, _ in check_logs(targets).values():
        _import_extra(kind)


def _import_extra(name: str) -> Any:
    """Import the module of the extra of the same name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"logging to {name} needs a package that is not installed ({error.name}): {how_to_install(name)}"
        ) from error


def _refused(kind: str, place: str, run_id: str | None, error: Exception) -> ConfigError:
    if run_id is None:
        return ConfigError(f"{kind} cannot start a run of {place!r}: {error}")
    return ConfigError(
        f"{kind} cannot continue run {run_id} of {place!r}: {error}; leave the tracker out of --log-to, or give it "
        "another place, in which it starts a new run"
    )

"""The group of settings of what a run reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.reporting.metric_logs import check_logs
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class ReportSettings(SettingGroup):
    """What a run reports, and where.

    Attributes:
        run_log: write a log of the run to the repository, which `datasvc runs` and `datasvc ui` show.
        log_to: experiment trackers: "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:EXPERIMENT".
        report_every: steps between reports; each report waits for the device.
        metrics_port: port on which the first rank of a node serves the metrics of its loaders for Prometheus; the
            next ranks of the node use the next ports. None: no metrics.
        profile: file for a trace of the loader's steps, written at the end of each epoch together with a printed
            report; with several ranks each has its own file, such as `trace.0.json`. None: no trace.
    """

    title: ClassVar[str] = "reports"

    run_log: bool = True
    log_to: Annotated[tuple[str, ...], Metavar("TRACKER:TARGET")] = ()
    report_every: Annotated[int, Metavar("STEPS"), Range(1)] = 1
    metrics_port: Annotated[int | None, Metavar("PORT"), Range(1)] = None
    profile: Annotated[str | None, Metavar("FILE")] = None

    def check(self) -> None:
        """Check the trackers, and that the folder of the trace exists."""
        check_logs(self.log_to)
        # Check the folder now: the trace is written at the end of an epoch, which may be hours away.
        if self.profile is not None and not Path(self.profile).absolute().parent.is_dir():
            raise ConfigError(f"profile is {self.profile!r}, and its folder does not exist; create the folder first")

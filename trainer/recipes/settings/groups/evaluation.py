"""The group of settings of evaluations and early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.repository.logs.metric_mode import choose_metric_mode
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(SettingGroup):
    """When and how a run evaluates, and whether evaluations end it.

    Attributes:
        evaluate_every: epochs between evaluations; each evaluation is followed by a checkpoint. None: evaluate at the
            end of the run only.
        statistics: statistics of batch normalisation: "average": moving averages of the training, averaged over the
            ranks; "recompute": means over batches of training data, with the weights that are evaluated.
        statistics_batches: steps of training data over which the means of "recompute" are computed.
        patience: number of consecutive evaluations without a new best `stop_metric` after which the run ends; None:
            never.
        stop_metric: metric of the evaluation that `patience` compares.
        stop_mode: "max" if a higher `stop_metric` is better, "min" if a lower one is; None: chosen by its name.
    """

    title: ClassVar[str] = "evaluation and early stopping"

    evaluate_every: Annotated[int | None, Metavar("EPOCHS"), Range(1)] = None
    statistics: Literal["average", "recompute"] = "average"
    statistics_batches: Annotated[int, Metavar("STEPS"), Range(1)] = 10
    patience: Annotated[int | None, Metavar("EVALUATIONS"), Range(1)] = None
    stop_metric: Annotated[str, Metavar("METRIC")] = "val_loss"
    stop_mode: Literal["max", "min"] | None = None

    @property
    def recomputes_statistics(self) -> bool:
        """Whether the statistics of batch normalisation are recomputed before each evaluation."""
        return self.statistics == "recompute"

    def check(self) -> None:
        """Check that settings have an effect, and that it is known which of two values of the metric is better."""
        if not self.recomputes_statistics and self.statistics_batches != EvaluationSettings.statistics_batches:
            raise ConfigError(
                f"statistics_batches is {self.statistics_batches}, and statistics is {self.statistics!r}, which uses "
                "no batches; give --statistics recompute, or leave it at "
                f"{EvaluationSettings.statistics_batches}"
            )
        if self.patience is None:
            return
        if self.evaluate_every is None:
            raise ConfigError("patience counts evaluations: set their period with --evaluate-every")
        # Called only for its error, which otherwise the first evaluation would raise.
        choose_metric_mode(self.stop_metric, self.stop_mode, option="--stop-mode")

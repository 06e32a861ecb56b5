"""Reads the compute times of a step from a file that `python -m datasvc.trainer profile --json` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.planning.step_time import ComputeTimes
from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.settings.config import TrainConfig

# Settings on which the measured times depend.
_SAME_SETTINGS: Final = ("vocabulary", "precision", "optimizer", "size")


@dataclass(frozen=True)
class MeasuredStep:
    """What a plan takes from a profile.

    Attributes:
        times: compute times of one rank with the whole model.
        micro_batch: samples of the measured passes.
        message_s: fixed cost of a collective.
    """

    times: ComputeTimes
    micro_batch: int
    message_s: float


def read_measured(path: str, config: TrainConfig) -> MeasuredStep:
    """Return the measured times of a profile of the training that `config` describes.

    Raises:
        ConfigError: the file is no profile, or was measured with another model or other settings.
    """
    try:
        profile = json.loads(Path(path).read_text(encoding="utf-8"))
        costs, measured = StepCosts.from_dict(profile["costs"]), profile["config"]
        micro_batch = min(measured["micro_batch"] or costs.samples, costs.samples)
        message_s, model = float(profile["message_s"]), measured["model"]
        options = list(measured["model_option"])
        settings = {name: measured[name] for name in _SAME_SETTINGS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no profile: {error!r}; write one with python -m datasvc.trainer profile --json"
        ) from error
    _check_same(path, config, {"model": model, "model_option": options, **settings})
    times = ComputeTimes(costs.forward_s / costs.samples, costs.backward_s / costs.samples, costs.update_s)
    return MeasuredStep(times, micro_batch, message_s)


def _check_same(path: str, config: TrainConfig, measured: dict[str, Any]) -> None:
    for name, value in measured.items():
        planned: Any = getattr(config, name)
        # A profile has the name of the model even if it is the default, and lists instead of tuples.
        planned = config.model_or_default if name == "model" else planned
        planned = list(planned) if isinstance(planned, tuple) else planned
        if planned != value:
            raise ConfigError(
                f"{path} was measured with {name} {value!r}, and the plan has {planned!r}; "
                f"give --{name.replace('_', '-')} as it was measured, or another profile"
            )

"""The group of settings of the batches and the length of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class LengthSettings(SettingGroup):
    """How many samples a step and a run have.

    Attributes:
        epochs: passes over the training split; the schedule ends with the last one.
        max_steps: maximum number of optimizer steps: the run may end before `epochs` are over. The schedule does not
            change. None: no maximum.
        stop_on_nan: end the run with an error, and save nothing more, when its loss or weights are NaN or infinite.
        batch_size: samples of one rank per step.
        global_batch: samples of all ranks per step, instead of `batch_size`; the training is then the same at any
            number of ranks that divides it.
        micro_batch: samples of one backward pass; gradients are accumulated over the passes of a step.
            None: one pass.
    """

    title: ClassVar[str] = "batches and length of the run"

    epochs: Annotated[int, Metavar("EPOCHS"), Range(1)] = 10
    max_steps: Annotated[int | None, Metavar("STEPS"), Range(1)] = None
    stop_on_nan: bool = False
    batch_size: Annotated[int, Metavar("SAMPLES"), Range(1)] = 32
    global_batch: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None
    micro_batch: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None

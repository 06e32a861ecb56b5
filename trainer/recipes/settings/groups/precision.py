"""The group of settings of the device and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.trainer.recipes.optimizers.precision import Precision
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, SettingGroup


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(SettingGroup):
    """On which device a run computes, in which precision and memory format.

    Attributes:
        device: "cpu", or "cuda" for the GPU of this rank.
        precision: "fp32"; "bf16" or "fp16": mixed precision, fp16 with a loss scale.
        channels_last: whether images and activations are in channels-last memory format.
        cudnn_benchmark: whether cuDNN measures which of its convolutions is fastest; faster, but results may differ
            in the last bits from run to run.
        compile: backend of torch.compile, such as "inductor"; None: not compiled.
    """

    title: ClassVar[str] = "device and precision"

    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    compile: Annotated[str | None, Metavar("BACKEND")] = None

"""The group of settings of how the ranks combine their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from datasvc.trainer.recipes.settings.groups.setting_group import SettingGroup


@dataclass(frozen=True, kw_only=True)
class GradientSettings(SettingGroup):
    """How the ranks combine their gradients.

    Attributes:
        compression: format of gradients in all-reduces: "none", "fp16" or "bf16".
    """

    title: ClassVar[str] = "gradients of the ranks"

    compression: Literal["none", "fp16", "bf16"] = "none"

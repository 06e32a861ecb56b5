"""The group of settings of how the loader decodes and prefetches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(SettingGroup):
    """How the loader decodes batches.

    Attributes:
        prefetch: batches that the loader prepares ahead; 0: none.
    """

    title: ClassVar[str] = "decoding"

    prefetch: Annotated[int, Metavar("BATCHES"), Range(0)] = 2

"""The group of settings of the access order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class OrderSettings(SettingGroup):
    """In which order a run reads the samples.

    Attributes:
        seed: seed of initialisation, order, augmentation and, together with the rank, dropout.
        shuffle: "global", which needs a cache for all of the data, or "windowed", which needs a small one.
        lanes: lanes of a windowed shuffle; see `OrderConfig`. With `lanes=1` and without `block`, the loader derives
            both from the sizes of the shards and of the cache.
        block: block of a windowed shuffle; see `OrderConfig`.
        sticky: whether each lane of a windowed shuffle has the same samples in every epoch, so that each node reads
            its own part of the data; needs `block`.
    """

    title: ClassVar[str] = "order of the samples"

    seed: Annotated[int, Metavar("NUMBER"), Range(0, 1 << 64)] = 0
    shuffle: Literal["global", "windowed"] = "global"
    lanes: Annotated[int, Metavar("NUMBER"), Range(1)] = 1
    block: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None
    sticky: bool = False

    def check(self) -> None:
        """Check that lanes, block and sticky fit the shuffle."""
        if self.shuffle != "windowed" and (self.lanes > 1 or self.block is not None):
            raise ConfigError(
                f"lanes is {self.lanes} and block is {self.block}, and shuffle is {self.shuffle!r}; they are for "
                "--shuffle windowed only"
            )
        if self.shuffle == "windowed" and self.block is None and self.lanes > 1:
            raise ConfigError(
                f"lanes is {self.lanes}, and block is not set; give --block too, the samples that are permuted "
                "together, or leave out --lanes: the loader then derives both"
            )
        if self.sticky and self.block is None:
            raise ConfigError(
                "sticky needs a windowed shuffle with numbers of its own; give --shuffle windowed, --lanes (a "
                "multiple of the number of nodes) and --block"
            )

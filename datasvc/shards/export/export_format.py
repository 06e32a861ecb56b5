"""What a format of exports does; one file per format implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasvc.shards.export.destination import Destination
from datasvc.shards.export.samples import ExportUnit
from datasvc.shards.versions.dataset import Split


@dataclass(frozen=True)
class WrittenFiles:
    """What was written of a unit, or to join a split.

    Attributes:
        num_samples: samples in it.
        num_files: files.
        size_bytes: bytes of these files.
        about: JSON values that the format wants to have when it joins the split.
    """

    num_samples: int
    num_files: int
    size_bytes: int
    about: Mapping[str, Any] = field(default_factory=dict)


class ExportFormat(ABC):
    """A format. Has no state, so that any process can have its own.

    Attributes:
        name: for `--format`.
        is_local_only: it cannot be written to a URL.
        is_one_per_split: a split is one unit, else each shard is one.
    """

    name: ClassVar[str]
    is_local_only: ClassVar[bool] = False
    is_one_per_split: ClassVar[bool] = False

    @abstractmethod
    def check(self, split: Split) -> None:
        """Raise ConfigError, naming the column, where the format cannot hold the samples of `split`."""

    @abstractmethod
    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the samples of a unit, the same bytes each time, replacing what an interrupted export left.

        Raises:
            ConfigError: a sample holds what the format cannot; names it.
            CorruptDataError, NotFoundError: its shard is.
            UnavailableError: a store failed, or the disk is full.
        """

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write what joins the units of a split, whose `WrittenFiles`s come in order, once all are there.

        Raises:
            ConfigError: together they are something the format cannot hold.
            UnavailableError: a store failed, or the disk is full.
        """
        del split, written, destination
        return WrittenFiles(0, 0, 0)

"""Interface of an export format, such as Parquet; each format implements it in a module of its own.

An export consists of units, usually one for each shard. `write` writes the files of one unit, and `join` writes the
files that describe a whole split.
"""

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
    """Counts and size of the files that one call of `ExportFormat.write` or `ExportFormat.join` wrote.

    Attributes:
        num_samples: number of samples in the files.
        num_files: number of files.
        size_bytes: total size of the files.
        about: JSON values about a unit, which `write` returns, the records of the export keep, and `join` reads.
    """

    num_samples: int
    num_files: int
    size_bytes: int
    about: Mapping[str, Any] = field(default_factory=dict)


class ExportFormat(ABC):
    """A format of exports. It has no state, so that each worker process can use its own instance.

    Attributes:
        name: name for `--format`.
        is_local_only: whether the destination must be a local folder.
        is_one_per_split: whether a split is one unit; otherwise each shard is a unit.
    """

    name: ClassVar[str]
    is_local_only: ClassVar[bool] = False
    is_one_per_split: ClassVar[bool] = False

    @abstractmethod
    def check(self, split: Split) -> None:
        """Raise ConfigError, with the name of the column, if the format cannot hold the samples of `split`."""

    @abstractmethod
    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the files of a unit. Each call writes the same bytes, and replaces files of an interrupted export.

        Raises:
            ConfigError: the format cannot hold a value; the message names the sample.
            CorruptDataError: a shard of the unit is damaged.
            NotFoundError: a shard of the unit is missing.
            UnavailableError: a store failed, or the disk is full.
        """

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write the files that describe a split as a whole, such as an index; the default writes none.

        Args:
            split: the split.
            written: results of `write` for the units of the split, in order.
            destination: destination of the export.

        Raises:
            ConfigError: the format cannot hold the units together.
            UnavailableError: a store failed, or the disk is full.
        """
        del split, written, destination
        return WrittenFiles(0, 0, 0)

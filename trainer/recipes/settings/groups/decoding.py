"""The group of settings of how the loader decodes and prefetches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(SettingGroup):
    """How the loader decodes batches, and what it records.

    Attributes:
        prefetch: batches that the loader prepares ahead; 0: none.
        decode: what decodes images; "auto" is the fastest one that works; see `DecodeConfig`.
        decode_threads: decoding threads of a rank; None: the processors of the node divided by its ranks.
        on_bad: what happens to images that do not decode: "raise" ends the run, "mask" leaves them out of loss and
            metrics.
        decode_group: name of a group of jobs of this node that decode each training batch once for all of them; None:
            no group.
        decode_lag: batches that a job of the group may be behind another one and still get its batches.
        ledger: folder that records which samples each rank served, for `datasvc audit`; the same for all ranks and
            restarts. None: no record.
    """

    title: ClassVar[str] = "decoding and loading"

    prefetch: Annotated[int, Metavar("BATCHES"), Range(0)] = 2
    # A test compares the choices with those of `DecodeConfig`, whose module takes long to import.
    decode: Literal["auto", "cpu", "gpu", "gpu-window", "gpu-whole", "pillow"] = "auto"
    decode_threads: Annotated[int | None, Metavar("THREADS"), Range(1)] = None
    on_bad: Literal["raise", "mask"] = "raise"
    decode_group: Annotated[str | None, Metavar("NAME")] = None
    decode_lag: Annotated[int, Metavar("BATCHES"), Range(1)] = 6
    ledger: Annotated[str | None, Metavar("FOLDER")] = None

    def check(self) -> None:
        """Check that the lag is that of a group, and that the group keeps the batches that its jobs prefetch."""
        if self.decode_group is None and self.decode_lag != DecodeSettings.decode_lag:
            raise ConfigError(
                f"decode_lag is {self.decode_lag}, and there is no decode group; give --decode-group, or leave it at "
                f"{DecodeSettings.decode_lag}"
            )
        if self.decode_group is not None and self.prefetch > self.decode_lag:
            raise ConfigError(
                f"prefetch is {self.prefetch}, and decode_lag is {self.decode_lag}: jobs of a decode group "
                "that prefetch more batches than it keeps would fall behind; raise --decode-lag, or lower --prefetch"
            )

    def without_records(self) -> Self:
        """Return the settings for a loader that writes no ledger, and decodes for itself what it reads."""
        return dataclasses.replace(self, ledger=None, decode_group=None, decode_lag=DecodeSettings.decode_lag)

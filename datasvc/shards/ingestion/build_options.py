"""Build options of an ingest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from datasvc.errors import ConfigError
from datasvc.shards.images.header import Reencoding

SHARD_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class BuildOptions:
    """The settings that, together with the source, determine the bytes of every shard.

    Attributes:
        shard_bytes: size of the samples in a full shard.
        decode_check: decode every image completely instead of checking its header and its end.
        reencoding: how images are made smaller, if at all.
        keep_order: keep the source's order instead of assigning samples to shards by a permutation.
        seed: seed of that permutation.
        val_fraction: fraction of "train" that becomes "val", chosen by the hash of each key.
        limit: number of samples to read of each split, the first ones of the source, bad ones included; None: all.

    Raises:
        ConfigError: a value is out of range.
    """

    shard_bytes: int = SHARD_BYTES
    decode_check: bool = False
    reencoding: Reencoding = field(default_factory=Reencoding)
    keep_order: bool = False
    seed: int = 0
    val_fraction: float = 0.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes is {self.shard_bytes}; expected at least 1")
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction is {self.val_fraction}; expected 0 <= val_fraction < 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; expected at least 1 sample")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed is {self.seed}; expected 0 <= seed < 2**64")

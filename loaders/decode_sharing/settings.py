"""How jobs share decoded batches: what `share=` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from datasvc.errors import ConfigError
from datasvc.loaders.decode_sharing.window import AHEAD

MAX_NAME_BYTES: Final = 50
SHARE_FORMAT: Final = 1
"""Of what the processes of a share say and lend to each other."""


@dataclass(frozen=True)
class DecodeGroup:
    """Which jobs of this node decode together, and how far apart they may run.

    Attributes:
        name: of the share; jobs of one user that give the same name use one decoding process.
        lag: batches that a job may be behind the fastest and still find what that took. So many, and a few more, are
            kept in memory, once for all jobs.
        patience: batches that the others wait, at most, for jobs that are further behind: late starters, or one that
            saved a checkpoint. One is regained with every eight that are decoded. 0: they never wait.
        when_behind: "alone": a job that lost touch decodes by itself, the same batches, until it meets the others
            again; "raise": it gets a `LagError`.
        silent_s: seconds after which a decoding process that shows no sign of life is given up.

    Raises:
        ConfigError: a value is out of range.
    """

    name: str
    lag: int = 6
    patience: int = 64
    when_behind: Literal["alone", "raise"] = "alone"
    silent_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES:
            raise ConfigError(f"a share's name has 1 to {MAX_NAME_BYTES} bytes; got {self.name!r}")
        if self.lag < 1:
            raise ConfigError(f"lag is {self.lag}; expected at least 1 batch")
        if self.patience < 0:
            raise ConfigError(f"patience is {self.patience}; expected at least 0 batches")
        if self.when_behind not in ("alone", "raise"):
            raise ConfigError(f"when_behind is {self.when_behind!r}; expected 'alone' or 'raise'")
        if not self.silent_s > 0:
            raise ConfigError(f"silent_s is {self.silent_s}; expected a time above 0")

    @property
    def num_slots(self) -> int:
        """Batches that are kept in memory."""
        return self.lag + AHEAD + 1

    @property
    def common(self) -> dict[str, Any]:
        """What all jobs of a share must agree on."""
        return {"share_format": SHARE_FORMAT, "lag": self.lag, "patience": self.patience}


def parse_share(share: DecodeGroup | str) -> DecodeGroup:
    """Return what `share=` means: a name alone takes all defaults. Raises ConfigError."""
    return DecodeGroup(share) if isinstance(share, str) else share

"""What passed through an origin, and what may go wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UNAVAILABLE: Final = "503"
REFUSE: Final = "refuse"
CUT: Final = "cut"
STALL: Final = "stall"
FLIP: Final = "flip"
SLOW: Final = "slow"
_KINDS: Final = (UNAVAILABLE, REFUSE, CUT, STALL, FLIP, SLOW)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one exchange.

    Attributes:
        kind: UNAVAILABLE answers 503 as S3 does; REFUSE resets the connection before any answer; CUT hangs up, and
            STALL falls silent until `Origin.resume`, after `offset` bytes of the body; FLIP inverts the byte at
            `offset` of the body; SLOW lets `rate` bytes per second through.
        offset: in the body of this answer: the object's byte 0 only where the request names no range.
        rate: bytes per second, of SLOW alone.
    """

    kind: str
    offset: int = 0
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or self.offset < 0 or (self.kind == SLOW) != (self.rate is not None):
            raise ValueError(f"no such fault: {self}")


@dataclass
class Exchange:
    """One request and what became of it.

    Attributes:
        number: counts the requests of an origin from 1.
        client: the address that asked.
        method: such as "GET".
        path: as asked for, with its query.
        range: the header `Range`, or "".
        status: of the answer; 0 where there was none.
        num_bytes: of the answer's body that were sent; of one that the client broke off, a little more than it got.
        fault: what was made to go wrong, or None.
    """

    number: int
    client: str
    method: str
    path: str
    range: str = ""
    status: int = 0
    num_bytes: int = 0
    fault: Fault | None = None

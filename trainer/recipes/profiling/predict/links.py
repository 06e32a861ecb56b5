"""Links between ranks and nodes, and parsers for "10GbE", "25GB/s" and "50us"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError

_PREFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BANDWIDTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(bE|bps|bit/s|bit|b/s|B/s)")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """The cost of a message over a link: `latency_s + size / bytes_per_s` (Hockney's alpha and beta).

    Attributes:
        bytes_per_s: in one direction; both directions have this rate at once.
        latency_s: of a message, including software overhead.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"a link of {self.bytes_per_s} bytes/s carries nothing")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"a latency of {self.latency_s} s; expected a finite number, not below 0")

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:g} GB/s and {self.latency_s * 1e6:g} us"


def parse_bandwidth(text: str) -> float:
    """Return bytes per second of "10GbE", "100Gbit/s", "200Gb/s" (bits) or "25GB/s" (bytes). Raises ConfigError."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no bandwidth; expected such as 10GbE, 100Gbit/s (bits) or 25GB/s (bytes)")
    bits = 1.0 if match[3] == "B/s" else 8.0
    return float(match[1]) * _PREFIXES[match[2].lower()] / bits


def parse_duration(text: str) -> float:
    """Return the seconds of "50us", "1.5ms" or "0s". Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no duration; expected such as 50us, 1.5ms or 2s")
    return float(match[1]) * _SECONDS[match[2]]

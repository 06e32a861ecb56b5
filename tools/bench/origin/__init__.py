"""An origin as a cluster sees it, on one machine: so fast per connection and in all, so late, and not always well.

An `Origin` stands before a real HTTP store, say an S3 gateway on loopback, forwards whole messages, and counts what
leaves; a `FileOrigin` serves a folder. Tests run an origin in their process and inject faults; benchmarks run it in
one of its own, with `OriginProcess`, so that its work does not slow down what they time.
"""

from __future__ import annotations

from .faults import CUT, FLIP, REFUSE, SLOW, STALL, UNAVAILABLE, Exchange, Fault
from .files import FileOrigin
from .pacing import Limits
from .process import OriginProcess
from .server import Origin

__all__ = [
    "CUT",
    "FLIP",
    "REFUSE",
    "SLOW",
    "STALL",
    "UNAVAILABLE",
    "Exchange",
    "Fault",
    "FileOrigin",
    "Limits",
    "Origin",
    "OriginProcess",
]

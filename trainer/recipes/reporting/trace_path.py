"""The path of a rank's trace, for the traces of epochs and of the profile."""

from __future__ import annotations

from pathlib import Path


def trace_path(path: str, *, rank: int, num_ranks: int) -> Path:
    """Return the path of a rank's trace. With several ranks, the rank comes before the suffix: `trace.1.json`."""
    trace = Path(path)
    return trace if num_ranks == 1 else trace.with_name(f"{trace.stem}.{rank}{trace.suffix}")

"""Where the time of each epoch went: said on standard error, as an event, and as a trace for Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasvc.loaders.core.loader import Loader


def profile_epoch(loader: Loader[Any], path: str, *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Write this rank's trace; rank 0 also prints the report. The next epoch's begins here.

    Args:
        loader: at the end of an epoch.
        path: of the trace.
        rank: of this process.
        num_ranks: of the job.

    Returns:
        The report as JSON values.

    Raises:
        ConfigError: the trace cannot be written.
    """
    report = loader.report()
    loader.restart_report()
    loader.write_trace(trace_path(path, rank=rank, num_ranks=num_ranks))
    if rank == 0:
        sys.stderr.write(f"{report}\n")
    return report.to_dict()


def trace_path(path: str, *, rank: int, num_ranks: int) -> Path:
    """Return where a rank's trace goes: each of several has its number before the suffix, `trace.1.json`."""
    whole = Path(path)
    return whole if num_ranks == 1 else whole.with_name(f"{whole.stem}.{rank}{whole.suffix}")

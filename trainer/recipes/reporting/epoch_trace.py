"""Reports where the time of an epoch was spent: on standard error, as an event, and as a trace for Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasvc.loaders.core.loader import Loader


def profile_epoch(loader: Loader[Any], path: str, *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Write this rank's trace and start the report of the next epoch; rank 0 also prints the report.

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
    """Return the path of a rank's trace; with several ranks it has the rank before the suffix: `trace.1.json`."""
    trace = Path(path)
    return trace if num_ranks == 1 else trace.with_name(f"{trace.stem}.{rank}{trace.suffix}")

"""The status of a cache as JSON values, for the status document of a node and for the command line."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasvc.cache import CacheStatus


def describe_cache(status: CacheStatus) -> dict[str, Any]:
    """Return a cache's status as JSON values."""
    return {**asdict(status), "jobs": [job._asdict() for job in status.jobs]}


def describe_disk(folder: Path) -> dict[str, int]:
    """Return the size of the disk of a folder, and its free bytes."""
    usage = shutil.disk_usage(folder)
    return {"total_bytes": usage.total, "free_bytes": usage.free}

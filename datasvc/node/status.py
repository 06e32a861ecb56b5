"""The status of a cache as JSON values, for the status document of a node and for the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from datasvc.cache import CacheStatus


def describe_cache(status: CacheStatus) -> dict[str, Any]:
    """Return a cache's status as JSON values."""
    return {**asdict(status), "jobs": [job._asdict() for job in status.jobs]}

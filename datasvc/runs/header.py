"""Headers of attempts: what an attempt of a run was started with, and where it runs."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from datasvc.runs.facts import limit_size, to_json_value

_MAX_FIELD_BYTES: Final = 1 << 20


def make_header(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of an attempt that starts now: `fields` that are not None, the time, and this process."""
    process = {
        "started": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "package": _package_version(),
        "python": sys.version.split()[0],
    }
    return {
        name: limit_size(to_json_value(value), _MAX_FIELD_BYTES)
        for name, value in {**fields, **process}.items()
        if value is not None
    }


def _package_version() -> str | None:
    try:
        return metadata.version("datasvc")
    except metadata.PackageNotFoundError:
        return None

"""Identifiers of runs, and references to them. An identifier begins with the time of the run's start, in UTC."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import Final

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import check_name

RUNS: Final = "runs"
"""Folder of all run logs in a repository."""
_TIME: Final = "%Y%m%d-%H%M%S"
_ID: Final = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{6}")


def new_run_id() -> str:
    """Return the identifier of a run that starts now. Identifiers sort by their time."""
    return f"{datetime.now(UTC).strftime(_TIME)}-{secrets.token_hex(3)}"


def is_run_id(text: str) -> bool:
    """Return whether `text` is an identifier of a run."""
    return _ID.fullmatch(text) is not None


def check_run_id(text: str) -> str:
    """Return `text` if it is an identifier of a run, otherwise raise ConfigError."""
    if not is_run_id(text):
        raise ConfigError(f"{text!r} is no identifier of a run; expected one such as '20261123-221830-3fa9c1'")
    return text


def started_s(run_id: str) -> float:
    """Return when a run started, in seconds since 1970, from its identifier; 0 if that has no valid time."""
    try:
        return datetime.strptime(run_id[:15], _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def run_folder(name: str, run_id: str) -> str:
    """Return the folder of a run, relative to the root of the repository."""
    return f"{RUNS}/{name}/{run_id}"


def parse_run(ref: str) -> tuple[str, str | None]:
    """Return the name and the identifier in `NAME/ID`; the identifier is None in `NAME`, the newest run.

    Raises:
        ConfigError: `ref` is no such reference.
    """
    name, slash, run_id = ref.partition("/")
    check_name(name, "run")
    return name, check_run_id(run_id) if slash else None

"""Runs stages, each in a process of its own with a time limit, and writes what each found into one folder.

What a later run of a stage can use is in the folder `kept`. Invariant: a file of the results is the whole outcome of
a stage that is over. A stage that was interrupted has none, and none of its processes outlives it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

from datasvc.durable import write_file

TOOLS: Final = Path(__file__).parents[1]
ROOT: Final = TOOLS.parent
TAIL_BYTES: Final = 20_000
_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def search_path() -> str:
    """Return PYTHONPATH of the programs of a stage: this project's folders, then what this process was given."""
    folders = (ROOT, TOOLS, os.environ.get("PYTHONPATH"))
    return os.pathsep.join(str(folder) for folder in folders if folder)


def read_outcome(out: Path, name: str) -> dict[str, Any] | None:
    """Return the outcome of a stage; None where it did not come to its end."""
    try:
        return json.loads((out / f"{name}.json").read_bytes())
    except FileNotFoundError:
        return None


def run_stage(name: str, title: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run a stage to its end or its limit, write its outcome to `OUT/NAME.json`, and return it."""
    began, started = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="datasvc-gpu-day-", ignore_cleanup_errors=True) as work:
        folder, log = Path(work, "data"), Path(work, "log")
        folder.mkdir()
        kept = out.absolute() / "kept"
        kept.mkdir(exist_ok=True)
        command = [sys.executable, "-P", str(TOOLS / "gpu_stages" / "child.py"), name, str(folder), str(kept)]
        problem = _run(command, log, limit_s)
        found = _read_figures(folder / "figures.json")
        tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    status, reason = found.pop("status", None), found.pop("reason", "")
    if problem or status is None:
        status, reason = "failed", problem or "the stage ended before it said how"
    outcome = {
        "stage": name,
        "title": title,
        "status": status,
        "reason": reason,
        "command": f"python tools/gpu_day.py OUT --stage {name}",
        "began": began,
        "duration_s": round(time.perf_counter() - started, 1),
        "limit_s": limit_s,
        **found,
        "log_tail": tail,
    }
    write_file(out / f"{name}.json", json.dumps(outcome, indent=1).encode())
    return outcome


def _run(command: list[str], log: Path, limit_s: float) -> str:
    """Run a command, and end all that it has started; returns what went wrong, "" if nothing did."""
    # Descendants whose parents are gone become children of this process, so that none escapes it.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    before = set(_children())
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            # Whoever is left of this process's group ends when this pipe does, so when this process is killed.
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": search_path(), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"the stage took longer than {limit_s:.0f} s and was ended; the same command continues it"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            _end_all_but(before)
    if process.returncode < 0:
        return f"the stage was killed by signal {-process.returncode}; the end of its log says where it was"
    if process.returncode:
        return f"the stage ended with status {process.returncode}; the end of its log says why"
    return ""


def _end_all_but(kept: set[int]) -> None:
    """Kill what has become a child of this process, until there is none: killing one may hand over others."""
    while orphans := set(_children()) - kept:
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """Return the processes whose parent this one is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            parent = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _read_figures(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}

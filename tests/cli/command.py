"""The program in the process of the test: its output, errors and exit status as a process of its own has them.

Starting an interpreter and its imports costs more than nearly every command; `run_apart` starts one all the same.
"""

import io
import os
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from datasvc.cli.main import main
from tests.support import warm_python

ROOT = Path(__file__).parents[2]


def run(*words, **variables):
    """Run a command with `variables` in its environment; one that is None or empty is absent there."""
    words = [str(word) for word in words]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environment(variables).items():
            patch.setenv(name, value) if value else patch.delenv(name, raising=False)
        patch.setattr(sys, "argv", ["datasvc", *words])
        patch.setitem(
            sys.modules, "__main__", ModuleType("__main__")
        )  # usage messages name the main module's package
        patch.chdir(ROOT)
        output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        workers = warm_python.workers() if words[:1] in (["ingest"], ["export"]) else nullcontext()
        with redirect_stdout(output), redirect_stderr(errors), workers:
            status = _status()
    texts = [stream.buffer.getvalue().decode().replace("\r\n", "\n") for stream in (output, errors)]
    return subprocess.CompletedProcess(words, status, *texts)


def run_apart(*words, **variables):
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'datasvc'; from datasvc.cli.main import main; main()"]
        + [str(word) for word in words],
        capture_output=True,
        text=True,
        env={name: value for name, value in {**os.environ, **_environment(variables)}.items() if value},
        cwd=ROOT,
        check=False,
    )


def _environment(variables):
    return {"COLUMNS": "200", **{name: str(value or "") for name, value in variables.items()}}


def _status():
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0

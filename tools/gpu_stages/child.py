"""The process that runs one stage: `runner.py` starts it, with folders for its data and what is kept, and ends it.

python -P tools/gpu_stages/child.py STAGE FOLDER KEPT
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

from gpu_stages.stage import NeedsGpu, Stage


def main() -> None:
    """Run the stage that is named, and write how it ended; what it raises is for the log."""
    name, folder, kept = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stage = Stage(Path(folder), kept=Path(kept), name=name)
    module = importlib.import_module(f"gpu_stages.{name}")
    stage.write()
    try:
        module.run(stage)
    except NeedsGpu as need:
        stage.write("needs-gpu", str(need))
    else:
        stage.write("done")


def _end_with_parent() -> None:
    """End this process's group once the parent, which holds the other end of standard input, is gone."""
    os.read(sys.stdin.fileno(), 1)  # not by `sys.stdin`, whose lock is needed at the end of the interpreter
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

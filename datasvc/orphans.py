"""Worker processes that end with whoever started them, however that died."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """Let this worker process end when its parent is gone: nobody else would tell it, and nobody waits for it."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="datasvc-parent").start()

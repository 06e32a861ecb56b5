"""What a program wrote to a terminal."""

import contextlib
import os


def read_terminal(leader):
    """Return all that was written; a terminal whose other side is closed ends with an error."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(leader, 4096):
            parts.append(part)
    os.close(leader)
    return b"".join(parts).decode()

"""What the two sides of a share say to each other: a JSON object a message, and a descriptor where memory goes along.

A consumer says                     and hears
    join      fingerprint               joined | mismatch fingerprint
                                        or ending reason: its place is free for a server of other settings
    ask       cursor                    promised behind | refused behind, reason
                                        ready cursor, number, memory, spans, with the memory's descriptor
                                        or lost cursor, reason
    forget                              forgotten, and nothing more of what it had asked for
    release   numbers                   nothing
    status                              status: what the server counted; a sign of life
                                        ended reason: the server met an error of its own
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from typing import Any, Final

Message = dict[str, Any]

_LARGEST_BYTES: Final = 64 << 10
_INT = array.array("i").itemsize


def send(connection: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send a message whole.

    Raises:
        OSError: the other side is gone, or does not read.
    """
    beside = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([json.dumps(message).encode()], beside, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[Message, int | None] | None:
    """Return the next message, and the descriptor that came with it, which the caller closes; None at the end.

    Raises:
        OSError: the other side is gone, or was silent for longer than the connection's time-out; this process can
            open no more files; the message is too long.
    """
    content, beside, flags, _ = connection.recvmsg(_LARGEST_BYTES, socket.CMSG_SPACE(_INT), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % _INT])
    is_cut = bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))
    for extra in descriptors if is_cut else descriptors[1:]:
        os.close(extra)
    if is_cut:
        # The kernel drops a descriptor that it finds no room for, and delivers the rest.
        number = errno.EMFILE if flags & socket.MSG_CTRUNC else errno.EMSGSIZE
        raise OSError(number, os.strerror(number))
    if not content:
        return None
    return json.loads(content), descriptors[0] if descriptors else None

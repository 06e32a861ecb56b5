"""Messages between a consumer and the decode server: one JSON object each, `type` and the fields below.

A consumer sends                    and receives
    join      fingerprint               joined | mismatch fingerprint
                                        | closing reason: the name is free for a server of other settings
    request   cursor                    pending behind | refused behind, reason
                                        after pending: batch cursor, number, memory, spans and a file descriptor
                                        | dropped cursor, reason
    cancel                              cancelled; no more batches of earlier requests
    release   numbers                   nothing
    status                              status with the server's counters; also shows that the server is alive
                                        at any time: failed reason, after an error of the server itself
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from typing import Any, Final

Message = dict[str, Any]

_MAX_BYTES: Final = 64 << 10
_INT = array.array("i").itemsize


def send(connection: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send one message, with a file descriptor if one is given.

    Raises:
        OSError: the other side has closed the connection or does not read.
    """
    ancillary = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([json.dumps(message).encode()], ancillary, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[Message, int | None] | None:
    """Return the next message and its file descriptor, if any, which the caller closes; None at the end.

    Raises:
        OSError: the other side has closed the connection, or sent nothing for the connection's time-out; this process
            has too many open files; the message is longer than 64 KiB.
    """
    content, ancillary, flags, _ = connection.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_INT), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % _INT])
    is_truncated = bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))
    for unused in descriptors if is_truncated else descriptors[1:]:
        os.close(unused)
    if is_truncated:
        # At the limit of open files the kernel drops the descriptor and delivers the message without it.
        number = errno.EMFILE if flags & socket.MSG_CTRUNC else errno.EMSGSIZE
        raise OSError(number, os.strerror(number))
    if not content:
        return None
    return json.loads(content), descriptors[0] if descriptors else None

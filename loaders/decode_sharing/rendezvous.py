"""How jobs of a node find the process that decodes for them: a socket whose name lives in the kernel alone.

Names in Linux's abstract name space are in no file system: whoever binds one has it, and it is free again once the
last process that listens there is gone, however that ended. So there is nothing to clean up, and no two servers. Who
may connect is decided by the user id that the kernel tells.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import suppress

from datasvc.errors import ConfigError
from datasvc.loaders.core.data_ranks import DataRanks

_BACKLOG = 128
_TRIES = 1000
_CREDENTIALS = struct.Struct("3i")  # unix(7): pid, uid, gid


def address_of(name: str, ranks: DataRanks) -> str:
    """Return where this user's share is found: each data rank of a job has its own."""
    return f"\0datasvc-share/{os.getuid()}/{ranks.rank}-of-{ranks.world_size}/{name}"


def connect_or_listen(address: str, timeout_s: float) -> tuple[socket.socket, socket.socket | None]:
    """Connect to the server at `address`, or take its place where there is none.

    Args:
        address: as `address_of` gives it.
        timeout_s: of everything that is done with the connection.

    Returns:
        A connection, and None; or, for who has to start the server, the socket to listen on as well. The connection
        waits there already, so a server that finds none has nobody to serve.

    Raises:
        ConfigError: this system has no such names, or another user has taken this one.
        OSError: neither was possible.
    """
    for _ in range(_TRIES):
        connection = _new_socket()
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            _check_user(connection, address)
            return connection, None
        listener = _listen(address)
        if listener is not None:
            connection = _new_socket()
            connection.settimeout(timeout_s)
            connection.connect(address)
            return connection, listener
        # Somebody else binds it this moment, and listens the next.
        os.sched_yield()
    raise OSError(errno.EADDRINUSE, "bound, but nobody listens there", address)


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ConfigError(f"share= needs the local sockets of Linux: {error}") from error


def _listen(address: str) -> socket.socket | None:
    listener = _new_socket()
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel knows it."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return int(user)


def is_gone(connection: socket.socket) -> bool:
    """Whether the other end is closed, whatever of it is still to be read."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is told unasked
    return bool(poll.poll(0))


def _check_user(connection: socket.socket, address: str) -> None:
    if user_of(connection) != os.getuid():
        with suppress(OSError):
            connection.close()
        raise ConfigError(f"the share {address[1:]!r} is held by another user of this node; choose another name")

"""Connection of the jobs of a node to their decoding process: a Unix socket in Linux's abstract name space.

Abstract names are in no file system. Only one process can bind a name, and the kernel frees it when the last process
that listens on it ends, even after a crash. So there are never two servers of one name, and no stale file. The user
id that the kernel reports decides who may connect.
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
    """Return the socket address of this user's decode group `name`; each data rank has an address of its own."""
    return f"\0datasvc-decode/{os.getuid()}/{ranks.rank}-of-{ranks.world_size}/{name}"


def connect_or_listen(address: str, timeout_s: float) -> tuple[socket.socket, socket.socket | None]:
    """Connect to the server at `address`; if there is none, bind the address and connect to that.

    Args:
        address: result of `address_of`.
        timeout_s: time-out of each operation on the connection.

    Returns:
        The connection, and None if a server exists. Otherwise the listening socket, with which the caller starts the
        server. The connection is already in its queue, so a server that finds an empty queue can end.

    Raises:
        ConfigError: this system has no abstract Unix sockets, or another user holds the name.
        OSError: neither connecting nor binding succeeded.
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
        # Another process has bound the address and is about to listen on it.
        os.sched_yield()
    raise OSError(errno.EADDRINUSE, "a process has bound the address and does not listen on it", address)


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ConfigError(
            f"decode_group needs Unix sockets of Linux: {error}; leave it out on this system"
        ) from error


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
    """Return the user id of the process at the other end, as reported by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def is_gone(connection: socket.socket) -> bool:
    """Return whether the other end is closed, even if data is still to be read."""
    poll = select.poll()
    poll.register(connection, 0)  # poll reports POLLHUP without being asked for it
    return bool(poll.poll(0))


def _check_user(connection: socket.socket, address: str) -> None:
    if user_of(connection) != os.getuid():
        with suppress(OSError):
            connection.close()
        raise ConfigError(f"another user of this node holds the decode group {address[1:]!r}; choose another name")

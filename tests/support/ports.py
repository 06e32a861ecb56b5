"""Ports for programs that take the number of one, and do not say which they chose."""

import socket
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count):
    """Yield numbers of ports at which servers may listen, in turn, and which the system gives to no other program.

    A socket that is bound without listening holds each. Linux lets others bind there only if both sides set
    SO_REUSEADDR and ask for this number, as servers do.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("", 0))
        yield [each.getsockname()[1] for each in sockets]

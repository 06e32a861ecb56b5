"""The store of a job, torch's `TCPStore`, through which the ranks find each other; the launcher serves it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from datasvc.trainer.env.environment import choose_gloo_interface
from datasvc.trainer.fast_imports import fast_imports
from datasvc.trainer.launch.ranks.job import RemoteSettings
from datasvc.trainer.launch.ranks.remote_guard import address_of_interface, find_interface

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

LOOPBACK = "127.0.0.1"
# With this variable, torch connects rank 0 to the launcher's store. Without it, rank 0 would serve another store.
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def open_listener(num_ranks: int, *, for_other_hosts: bool) -> socket.socket:
    """Open a port for the store, on all interfaces or on the loopback interface only.

    Ranks may connect before `serve_store` is called. The kernel queues their connections; the queue has room for all.

    Raises:
        OSError: no port is available.
    """
    return socket.create_server(("" if for_other_hosts else LOOPBACK, 0), backlog=max(128, 2 * num_ranks))


def serve_store(listener: socket.socket) -> TCPStore:
    """Serve a store at the listener until the result is deleted. Imports torch, which takes seconds."""
    with fast_imports():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # see above

    # The store closes its descriptor, so it gets a duplicate of the listener's.
    fd = os.dup(listener.fileno())
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def list_addresses(hosts: Sequence[str], interfaces: Sequence[str]) -> tuple[str, ...]:
    """Return addresses of this machine that the hosts may reach, the most likely first.

    Args:
        hosts: names of the other hosts; the local addresses of the routes to them come first.
        interfaces: names of network interfaces; if there are any, only their addresses are returned.

    Raises:
        ValueError: an interface does not exist or has no IPv4 address.
    """
    if interfaces:
        return tuple(_address_of_interface(name) for name in interfaces)
    candidates = [_address_towards(host) for host in hosts]
    # No machine has 192.0.2.1 (RFC 5737), so the route to it is the default route.
    candidates += [_hostname_address(), _address_towards("192.0.2.1")]
    addresses = dict.fromkeys(address for address in candidates if address is not None)
    # The hosts try all addresses. Loopback comes last: it is right only if a host is another name of this machine.
    return tuple(sorted(addresses, key=lambda address: address.startswith("127.")))


def plan_interfaces(settings: RemoteSettings, addresses: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select the network interfaces between the hosts.

    By default Gloo uses the address of the host name, often a loopback address, which other hosts cannot reach.
    `addresses` are those of this machine that other hosts may reach, the most likely first; empty if there are no
    other hosts, and for a rank on another host.
    """
    if settings.network_interfaces:
        names = ",".join(settings.network_interfaces)
        return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}
    if chosen := choose_gloo_interface(environ):
        return chosen
    if not addresses or "GLOO_SOCKET_IFNAME" in environ:
        return {}
    name = find_interface(addresses[0])
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def _address_towards(host: str) -> str | None:
    """Return the local address of the route to a host; None without a route or if the name is unknown."""
    # Connecting a datagram socket, here to any port, sends nothing; the kernel only chooses the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _hostname_address() -> str | None:
    """Return the address that the name of this machine resolves to; None if it resolves to none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _address_of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return address_of_interface(name, probe)
        except OSError as error:
            names = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ValueError(
                f"network interface {name} has no IPv4 address: {error.strerror}; use one of {names}"
            ) from None

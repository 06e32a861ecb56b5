"""The store at which ranks meet: served by the launcher, so that it outlives every rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from datasvc.trainer.env.environment import choose_gloo_interface
from datasvc.trainer.launch.ranks.job import RemoteSettings
from datasvc.trainer.launch.ranks.remote_guard import address_of_interface, find_interface

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

LOOPBACK = "127.0.0.1"
# torch's word for "the launcher serves the store, rank 0 does not".
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def open_listener(num_ranks: int, *, for_other_hosts: bool) -> socket.socket:
    """A port for the store, on all interfaces or on the loopback one only.

    Ranks may connect before `serve_store`: the kernel keeps them waiting.

    Raises:
        OSError: no port can be had.
    """
    return socket.create_server(("" if for_other_hosts else LOOPBACK, 0), backlog=max(128, 2 * num_ranks))


def serve_store(listener: socket.socket) -> TCPStore:
    """Serves a store at the listener until the result is dropped. Imports torch, which takes seconds."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # see above

    # The store closes what it is given, so it gets a copy.
    fd = os.dup(listener.fileno())
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def list_addresses(hosts: Sequence[str], interfaces: Sequence[str]) -> tuple[str, ...]:
    """Addresses of this machine that the hosts may reach, likeliest first.

    Args:
        hosts: names of the other hosts; a way that leads to them starts at a good address.
        interfaces: only the addresses of these network interfaces, if any are named.

    Raises:
        ValueError: an interface does not exist or has no IPv4 address.
    """
    if interfaces:
        return tuple(_address_of_interface(name) for name in interfaces)
    found = [address for host in hosts if (address := _address_towards(host)) is not None]
    found += [address for address in (_own_name(), _address_towards("192.0.2.1")) if address is not None]
    # The hosts try them all, so loopback, right where a host is this machine by another name, comes last.
    return tuple(sorted(dict.fromkeys(found), key=lambda address: address.startswith("127.")))


def plan_interfaces(settings: RemoteSettings, addresses: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make ranks talk over the interfaces by which the hosts reach each other.

    Gloo would take what the host's name means, which is often a loopback address.
    """
    if settings.network_interfaces:
        names = ",".join(settings.network_interfaces)
        return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}
    if chosen := choose_gloo_interface(environ):
        return chosen
    name = find_interface(addresses[0]) if addresses and "GLOO_SOCKET_IFNAME" not in environ else None
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def _address_towards(host: str) -> str | None:
    # Connecting a datagram socket sends nothing; the kernel only picks the way.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _own_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _address_of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return address_of_interface(name, probe)
        except OSError as error:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ValueError(
                f"network interface {name} has no IPv4 address: {error.strerror}; there are {known}"
            ) from None

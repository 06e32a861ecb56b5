"""A link of limited speed and with a delay between two network namespaces, for kernels without netem.

A process of its own reads the packets of a TUN device in each namespace, and writes them to the other one when a link
of this speed and delay would have delivered them. It loses only those for a device that is down. Needs root and
/dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import struct
import sys
import threading
import time

_MAX_PACKET = 65_536
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # linux/if_tun.h
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def relay(first: int, second: int, bytes_per_s: float, delay_s: float) -> None:
    """Make a device "eth0" in the namespaces of two processes, print a line, and relay until the input ends.

    Args:
        first: number of a process in a namespace.
        second: number of one in the other.
        bytes_per_s: speed of each direction.
        delay_s: delay of each direction, after the time that the speed takes.
    """
    devices = [_open_tun(process) for process in (first, second)]
    for source, target in (devices, reversed(devices)):
        packets: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(source, packets, bytes_per_s, delay_s), daemon=True).start()
        threading.Thread(target=_deliver, args=(target, packets), daemon=True).start()
    print("{}", flush=True)
    sys.stdin.read()  # it ends with the parent, however that ends


def _open_tun(process: int) -> int:
    with open(f"/proc/{process}/ns/net", "rb") as there, open("/proc/self/ns/net", "rb") as here:
        _enter(there.fileno())
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
        _enter(here.fileno())
    return device


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def _receive(
    source: int, packets: queue.SimpleQueue[tuple[float, bytes]], bytes_per_s: float, delay_s: float
) -> None:
    free_at = 0.0  # when the link has sent what it has
    while True:
        packet = os.read(source, _MAX_PACKET)
        free_at = max(free_at, time.monotonic()) + len(packet) / bytes_per_s
        packets.put((free_at + delay_s, packet))


def _deliver(target: int, packets: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        deliver_at, packet = packets.get()
        time.sleep(max(0.0, deliver_at - time.monotonic()))
        with contextlib.suppress(OSError):  # a link drops packets for a device that is down
            os.write(target, packet)

"""How much of the processors a rank really gets, and what its threads take from each other: measured.

Counting processors does not say it: ranks share a node, containers have quotas, other programs run.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Final

import numpy as np

import trainer as hvd

_SPIN_S: Final = 0.1
_BLOCK: Final = bytes(64 << 10)  # hashing as much lets other threads run


def measure_contention(num_beside: int) -> float:
    """Return the seconds that a thread loses for each second of processor time that others spend beside it.

    Let all ranks compute in one thread each, which gets a share p of a processor, and then in 1 + m threads each, of
    which every one gets a share q. Beside w seconds of work, which m threads do in w / (m q), the first thread does
    what took it q / p of that time. So it loses w (1 - q / p) / (m q). Every rank calls this.

    Args:
        num_beside: m.

    Returns:
        Between 0 and 1 / p, the same on all ranks.
    """
    alone = _mean(_share(1))
    beside = min(alone, _mean(_share(1 + num_beside)))
    return (1 - beside / alone) / (num_beside * beside)


def _share(num_threads: int) -> float:
    """Return the share of a processor that each of several computing threads gets, while all ranks do the same."""
    hvd.barrier()
    shares: list[float] = []
    threads = [threading.Thread(target=_spin, args=(shares,)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(shares) / num_threads


def _spin(shares: list[float]) -> None:
    began_s, used_s = time.perf_counter(), time.thread_time()
    while (passed_s := time.perf_counter() - began_s) < _SPIN_S:
        hashlib.blake2b(_BLOCK).digest()
    shares.append((time.thread_time() - used_s) / passed_s)


def _mean(share: float) -> float:
    return float(np.mean(hvd.allgather_object(share, name="profile.share")))

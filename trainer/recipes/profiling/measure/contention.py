"""How much of the processors a rank really gets, and what its threads take from each other: measured.

Counting processors does not say it: ranks share a node, containers have quotas, other programs run.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Final

import numpy as np

import datasvc.trainer as hvd

_SPIN_S: Final = 0.1
_BLOCK: Final = bytes(64 << 10)  # hashing as much lets other threads run
_MIN_SHARE: Final = 1e-3


def measure_contention(num_training: int, num_beside: int) -> float:
    """Return the seconds that the training loses for each second of processor time that others spend beside it.

    All ranks compute in as many threads as the training does, and then in some more. Every rank calls this.

    Args:
        num_training: threads that compute forward and backward passes: torch's team, or the one that feeds a GPU.
        num_beside: threads of the loader.

    Returns:
        See `contention_of`; the same on all ranks.
    """
    alone = _mean(_share(num_training))
    return contention_of(alone, _mean(_share(num_training + num_beside)), num_beside)


def contention_of(alone: float, beside: float, num_beside: int) -> float:
    """Return the seconds that a team of threads loses for each second of processor time spent beside it.

    Let each thread of the team get a share p of a processor; and with m threads beside a share q, as each of those.
    Beside w seconds of work, which they do in w / (m q), the team does what took it q / p of that time. So it loses
    w (1 - q / p) / (m q): nothing with processors to spare, and one by the number of those it had where all are busy.

    Args:
        alone: p, above 0.
        beside: q; what is more than p is noise.
        num_beside: m.
    """
    alone = max(_MIN_SHARE, alone)
    beside = min(alone, max(_MIN_SHARE, beside))
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

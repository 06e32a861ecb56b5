"""Measures processor contention, from the share of a processor that each thread of a rank gets.

The number of processors does not tell this share: ranks share a node, containers have quotas, other programs run.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

import datasvc.trainer as hvd

_SPIN_S: Final = 0.1
_BLOCK: Final = bytes(64 << 10)  # while Python hashes this many bytes in one call, its other threads can run
_MIN_SHARE: Final = 1e-3


def measure_contention(num_training: int, num_beside: int) -> float:
    """Return the seconds that training loses per second of processor time of concurrent threads; equal on all ranks.

    All ranks compute with `num_training` threads, then with `num_beside` more. Every rank calls this.

    Args:
        num_training: threads of forward and backward passes: torch's pool, or the one that launches GPU work.
        num_beside: threads of the loader.
    """
    alone = _mean_share(num_training)
    return contention_of(alone, _mean_share(num_training + num_beside), num_beside)


def contention_of(alone: float, beside: float, num_beside: int) -> float:
    """Return the seconds that a pool of threads loses per second of processor time of m concurrent threads.

    Alone, each thread of the pool gets a share p of a processor. Beside m other threads, each thread gets a share q.
    The m threads do w seconds of work in w / (m q) seconds. Alone, the pool would do its work of that time in q / p
    of the time, so it loses w (1 - q / p) / (m q) seconds: 0 with idle processors, up to w / (processors of the pool)
    if all are busy. `alone` is p, `beside` is q, `num_beside` is m. The result is for w = 1.
    """
    # Limit both: a share of 0, or a share that grows with the load, is noise of short measurements.
    alone = max(_MIN_SHARE, alone)
    beside = min(alone, max(_MIN_SHARE, beside))
    return (1 - beside / alone) / (num_beside * beside)


def _mean_share(num_threads: int) -> float:
    """Return the mean share of a processor that `num_threads` threads of each rank get while all compute alike."""
    hvd.barrier()
    with ThreadPoolExecutor(num_threads) as pool:
        shares = list(pool.map(_spin, [_SPIN_S] * num_threads))
    return float(np.mean(hvd.allgather_object(sum(shares) / num_threads, name="profile.share")))


def _spin(duration_s: float) -> float:
    """Compute in the calling thread; return its processor time per second."""
    began_s, used_s = time.perf_counter(), time.thread_time()
    while (passed_s := time.perf_counter() - began_s) < duration_s:
        hashlib.blake2b(_BLOCK).digest()
    return (time.thread_time() - used_s) / passed_s

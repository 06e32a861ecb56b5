"""Measures how much training slows down if other threads of its rank need the processors too.

The share of a processor that each thread gets is measured with busy threads. The number of processors does not
determine this share, because ranks share a node, containers have quotas, and other programs run.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

import datasvc.trainer as hvd

_SPIN_S: Final = 0.1
_BLOCK: Final = bytes(64 << 10)  # so large that hashing it releases Python's lock, and other threads can run
_MIN_SHARE: Final = 1e-3  # prevents divisions by 0


def measure_contention(num_training: int, num_beside: int) -> float:
    """Return the seconds that training loses per second of processor time of the loader; equal on all ranks.

    All ranks first keep `num_training` threads busy, then `num_beside` more. Every rank must call this.

    Args:
        num_training: number of threads of the forward and backward passes: torch's pool on a CPU; 1 on a GPU, the
            thread that launches the work.
        num_beside: number of threads of the loader.
    """
    alone = _mean_share(num_training)
    beside = _mean_share(num_training + num_beside)
    return contention_of(alone, beside, num_beside)


def contention_of(alone: float, beside: float, num_beside: int) -> float:
    """Return the seconds that a pool of threads loses per second of processor time of other threads.

    Let p be the share of a processor that each thread of the pool gets while it runs alone, and q the share that each
    thread gets beside m other threads. The m threads do w seconds of work in w / (m q) seconds. Alone, the pool would
    need only q / p of that time for the same work. It therefore loses w (1 - q / p) / (m q) seconds: 0 with idle
    processors, up to w / (processors of the pool) if all are busy.

    Args:
        alone: p.
        beside: q.
        num_beside: m.

    Returns:
        The lost seconds for w = 1.
    """
    # Limit both shares: a share of 0, or a share that grows with the load, is noise of a short measurement.
    alone = max(_MIN_SHARE, alone)
    beside = min(alone, max(_MIN_SHARE, beside))
    return (1 - beside / alone) / (num_beside * beside)


def _mean_share(num_threads: int) -> float:
    """Return the mean share of a processor that a thread gets while `num_threads` threads of every rank are busy."""
    hvd.barrier()  # all ranks measure at the same time, because ranks of a node share its processors
    with ThreadPoolExecutor(num_threads) as pool:
        shares = list(pool.map(_spin, [_SPIN_S] * num_threads))
    return float(np.mean(hvd.allgather_object(sum(shares) / num_threads, name="profile.share")))


def _spin(duration_s: float) -> float:
    """Keep the calling thread busy for `duration_s`; return its processor time per second."""
    began_s, used_s = time.perf_counter(), time.thread_time()
    while (passed_s := time.perf_counter() - began_s) < duration_s:
        hashlib.blake2b(_BLOCK).digest()
    return (time.thread_time() - used_s) / passed_s

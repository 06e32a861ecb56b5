"""Measures processor contention: what share of a processor the threads of a rank get.

The number of processors does not tell: ranks share a node, containers have quotas, other programs run.
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
    """Return the seconds that training loses per second of processor time of concurrent threads.

    All ranks compute with as many threads as training, then with `num_beside` more. Every rank calls this.

    Args:
        num_training: threads of forward and backward passes: torch's pool, or the one that launches GPU work.
        num_beside: threads of the loader.

    Returns:
        See `contention_of`; equal on all ranks.
    """
    alone = _mean(_share(num_training))
    return contention_of(alone, _mean(_share(num_training + num_beside)), num_beside)


def contention_of(alone: float, beside: float, num_beside: int) -> float:
    """Return the seconds that a pool of threads loses per second of processor time of m concurrent threads.

    Each thread of the pool gets a share p of a processor alone, and a share q, as do the others, beside m threads.
    These do w seconds of work in w / (m q) seconds. The pool does in that time what took q / p of it alone, so it
    loses w (1 - q / p) / (m q): 0 with idle processors, up to 1 / (processors of the pool) if all are busy.

    Args:
        alone: p, above 0.
        beside: q; values above p are noise.
        num_beside: m.
    """
    alone = max(_MIN_SHARE, alone)
    beside = min(alone, max(_MIN_SHARE, beside))
    return (1 - beside / alone) / (num_beside * beside)


def _share(num_threads: int) -> float:
    """Return the share of a processor that each of `num_threads` gets while all ranks compute alike."""
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

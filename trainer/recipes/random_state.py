"""Seeds, saves and restores the random number generators of one rank, which dropout and similar layers use.

Random numbers of the data, such as those of crops, are computed from the position of a sample instead.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - programs draw from the global generator
    torch.manual_seed(seed)


def seed_of_rank(seed: int, rank: int, *, step: int = 0, num_applied: int = 0) -> int:
    """Return the seed of a rank from `step` on. Ranks have different seeds, so their dropout masks differ.

    `num_applied`: samples since that step that the weights have learned from, in the middle of an averaging round.
    """
    # SeedSequence mixes the numbers. With their sum as the seed, (rank 0, step 1) and (rank 1, step 0) would
    # have the same seed.
    in_round = (num_applied,) if num_applied else ()
    words = np.random.SeedSequence((seed % (1 << 64), rank, step, *in_round)).generate_state(1, np.uint64)
    return int(words[0])


def capture() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch as a state tree."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - programs draw from the global generator
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def reinstate(state: Mapping[str, Any]) -> None:
    """Set the generators to a state that `capture` returned."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

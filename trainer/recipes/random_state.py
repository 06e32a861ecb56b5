"""The random states of one rank, for the draws that are no function of the position, such as dropout."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, so that nothing of a run depends on when it started."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the global one is what users draw from
    torch.manual_seed(seed)


def seed_of_rank(seed: int, rank: int, *, step: int = 0) -> int:
    """Return the seed of what a rank draws from a step on: no two ranks drop the same units of their samples.

    Args:
        seed: of the run.
        rank: of the process.
        step: at which the draws begin.
    """
    words = np.random.SeedSequence((seed % (1 << 64), rank, step)).generate_state(1, np.uint64)
    return int(words[0])


def capture() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators as a state tree."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global one is what users draw from
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def reinstate(state: Mapping[str, Any]) -> None:
    """Set the generators to what `capture` gave."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

"""Randomness of users' transforms as a function of (seed, epoch, position).

A transform draws from its parameter `generator`, or from the global generators of torch, numpy and Python, as most
transform libraries do. In both cases a sample gets the same numbers in every process and after every restart.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.random import mtrand

from datasvc.keyed_random import Keys, derive_keys
from datasvc.loaders.augment.augment import generators
from datasvc.loaders.torch.states import ServedIndex

_GLOBAL_GENERATORS = 48  # number of this use of keys. Each use has another number, so that draws are independent
_BOUND: Final = 1 << 63  # all seeds are below this number, so that they fit into int64


class SeededTransform:
    """Calls a user's transform with random numbers that depend on the sample's position.

    The transform gets a `numpy.random.Generator` if it has a parameter `generator`.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self._transform = transform
        self._takes_generator = _has_generator(transform)

    def __call__(self, sample: dict[str, Any], served: ServedIndex | None) -> Any:
        """Return the transformed sample. Without an order, `served` is None and global generators are not seeded."""
        if served is None:
            return self._call(sample, generator_without_order)
        with global_generators_at(served):
            return self._call(sample, lambda: generator_at(served))

    def _call(self, sample: dict[str, Any], make_generator: Callable[[], np.random.Generator]) -> Any:
        if self._takes_generator:
            return self._transform(sample, generator=make_generator())
        return self._transform(sample)


def generator_at(index: ServedIndex) -> np.random.Generator:
    """Return a new generator for one served sample, equal to the one of `ImageLoader` at the same position."""
    return generators(index.seed, index.epoch, np.array([index.position]))[0]


def generator_without_order() -> np.random.Generator:
    """Return a new generator for a sample without an order, seeded from torch's global generator."""
    # The limit of `randint` must itself fit into int64.
    return np.random.default_rng(int(torch.randint(_BOUND - 1, (), dtype=torch.int64, device="cpu").item()))


@contextmanager
def global_generators_at(index: ServedIndex) -> Iterator[None]:
    """Seed the global generators of torch (CPU), numpy and Python for one served sample. Restore them afterwards."""
    counter = np.array([0, 0, index.position, 0], np.uint64)  # so far apart that positions share no random numbers
    bits = np.random.Generator(np.random.Philox(key=_keys(index.seed, index.epoch), counter=counter))
    torch_seed, numpy_seed, python_seed = bits.integers(0, _BOUND, 3).tolist()
    # Replace numpy's generator during the block, because saving its state takes ten times as long.
    torch_state, numpy_generator, python_state = torch.get_rng_state(), mtrand.get_bit_generator(), random.getstate()
    mtrand.set_bit_generator(_substitute_generator())
    # numpy takes a seed as words of 32 bits.
    np.random.seed([numpy_seed >> 32, numpy_seed & 0xFFFFFFFF])  # noqa: NPY002 - transforms draw from the global one
    torch.default_generator.manual_seed(torch_seed)
    random.seed(python_seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        mtrand.set_bit_generator(numpy_generator)
        random.setstate(python_state)


@lru_cache(maxsize=1)
def _substitute_generator() -> np.random.MT19937:
    """Return the generator that replaces numpy's global one. It is seeded for each sample, so one is enough."""
    return np.random.MT19937(0)


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> Keys:
    """Return the keys of an epoch, cached because every sample of the epoch needs them."""
    return derive_keys(seed, epoch, _GLOBAL_GENERATORS, 2)


def _has_generator(transform: Callable[..., Any]) -> bool:
    try:
        return "generator" in inspect.signature(transform).parameters
    except (ValueError, TypeError):  # a C function without a signature
        return False

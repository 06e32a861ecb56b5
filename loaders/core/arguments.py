"""The arguments that loaders and samplers share: the checks of their sizes, and the choice of the access order."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Literal

from datasvc.errors import ConfigError
from datasvc.loaders.core.mixture import Mixture
from datasvc.order import OrderConfig, Shuffle, Tail, count_steps
from datasvc.printable import count_text
from datasvc.shards import Split


def choose_order(
    order: OrderConfig | None,
    *,
    seed: int | None,
    shuffle: Shuffle | Literal["auto"],
    training: bool,
    derive: Callable[[int], OrderConfig],
) -> OrderConfig:
    """Return the parameters of a loader's access order; for the arguments see `Loader`.

    `derive` returns the windowed order for a seed. It is called for `shuffle="windowed"` without `order`.

    Raises:
        ConfigError: `order` is given together with `seed` or `shuffle`; a value is out of range.
    """
    if order is not None:
        if seed is not None or shuffle != "auto":
            raise ConfigError(
                f"seed={seed} and shuffle={shuffle!r} are given together with order={order}, which has both; give "
                "them in the OrderConfig only"
            )
        return order
    if shuffle == "windowed":
        return derive(OrderConfig(seed=seed or 0).seed)  # `OrderConfig` checks the seed before the slow `derive`
    chosen = ("global" if training else None) if shuffle == "auto" else shuffle
    return OrderConfig(seed=seed or 0, shuffle=chosen)


def check_num_steps(samples: Split | Mixture, *, batch_size: int, world_size: int, tail: Tail) -> None:
    """Raise ConfigError if there are fewer samples than ranks, or an epoch has no step."""
    if samples.num_positions < world_size:
        raise ConfigError(f"{samples!r} has fewer samples than there are ranks: {world_size}; use fewer ranks")
    if not count_steps(0, samples.num_positions, batch_size * world_size, tail):
        raise ConfigError(
            f"{samples!r} gives no full batch of {batch_size} x {count_text(world_size, 'rank')} with "
            "tail='drop'; use smaller "
            "batches, or tail='pad'"
        )


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError, with the argument's name, if a number is below 1 or no integer; None is allowed."""
    for name, value in sizes.items():
        if value is not None and not isinstance(value, Integral):
            raise ConfigError(f"{name} is {value!r}; expected an integer")
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")

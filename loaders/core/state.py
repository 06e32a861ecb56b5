"""Where a loader stands, as JSON values: of a split that is `OrderState`, of a mixture what is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.core.split_reader import Cursor
from datasvc.order import OrderConfig, OrderState
from datasvc.shards import Split

MIXTURE_STATE_FORMAT: Final = 1
DECODE: Final = "decode"
"""What decodes, in the state of an image loader: no part of the order, and not in states from before it was kept."""
_FORMAT: Final = "mixture_format"
_CURSOR: Final = ("epoch", "position")


def save_state(samples: Split | Mixture, order: OrderConfig, cursor: Cursor) -> dict[str, Any]:
    """Return where a loader of these samples, in that order, stands."""
    if isinstance(samples, Mixture):
        own = {_FORMAT: MIXTURE_STATE_FORMAT, "epoch": cursor.epoch, "position": cursor.position}
        return own | {"mixture": samples.describe()} | dataclasses.asdict(order)
    return OrderState(samples.digest, cursor.epoch, cursor.position, order).to_dict()


def restore_state(state: Mapping[str, Any], samples: Split | Mixture, order: OrderConfig) -> Cursor:
    """Return where a loader of these samples goes on.

    Raises:
        ConfigError: not a state, or one of a later format.
        StateMismatchError: it belongs to other samples, weights or another order; says both.
    """
    state = {name: value for name, value in state.items() if name != DECODE}
    if isinstance(samples, Mixture):
        return _restore_mixture(state, samples, order)
    if _FORMAT in state:
        raise StateMismatchError(
            f"the state belongs to a mixture of {_say(state)}, this loader reads {samples!r} alone"
        )
    wanted = OrderState.from_dict(state)
    wanted.check_matches(samples.digest, order, len(samples))
    return Cursor(wanted.epoch, wanted.position)


def _restore_mixture(state: Mapping[str, Any], samples: Mixture, order: OrderConfig) -> Cursor:
    expected = save_state(samples, order, Cursor(0, 0))
    if _FORMAT not in state:
        single = OrderState.from_dict(state)
        raise StateMismatchError(
            f"the state belongs to one split, of shard table {single.version[:12]}..., this loader reads {samples!r}"
        )
    if state[_FORMAT] != MIXTURE_STATE_FORMAT:
        raise ConfigError(
            f"this state of a mixture has format {state[_FORMAT]}; this datasvc reads format {MIXTURE_STATE_FORMAT}"
        )
    is_whole = state.keys() == expected.keys() and all(_is_count(state[name]) for name in _CURSOR)
    if not is_whole or _fields(state).keys() != _fields(expected).keys():
        raise ConfigError(
            f"this is no state of a mixture: expected the fields {sorted(_fields(expected))}, epoch and position "
            f"integers from 0 on; found {dict(state)}"
        )
    _check_same(state, expected)
    cursor = Cursor(state["epoch"], state["position"])
    if cursor.position > len(samples):
        raise StateMismatchError(f"the state's position {cursor.position} lies outside 0..{len(samples)}")
    return cursor


def _check_same(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if _versions(state) != _versions(expected):
        raise StateMismatchError(
            f"the state belongs to a mixture of {_say(state)}, this loader reads one of {_say(expected)}; mix the "
            "versions that the state was saved with, in their order"
        )
    saved, found = _fields(state), _fields(expected)
    differing = [name for name in found if name not in (*_CURSOR, "mixture.splits") and saved[name] != found[name]]
    if differing:
        both = [", ".join(f"{name}={each[name]!r}" for name in differing) for each in (saved, found)]
        raise StateMismatchError(
            f"the state of a mixture of {_say(state)} was saved with {both[0]}, this loader has {both[1]}; give the "
            "mixture and the loader what the state was saved with"
        )


def _fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields in one dict, those of the mixture as "mixture.weights"."""
    own = {name: value for name, value in state.items() if name != "mixture"}
    mixture = state["mixture"]
    return own | (
        {f"mixture.{name}": value for name, value in mixture.items()} if isinstance(mixture, Mapping) else {}
    )


def _versions(state: Mapping[str, Any]) -> list[str]:
    # Not the names: a version may be opened by a tag.
    return [split["version"] for split in _splits(state)]


def _say(state: Mapping[str, Any]) -> str:
    return ", ".join(f"{split['name']} (shard table {split['version'][:12]}...)" for split in _splits(state))


def _splits(state: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Return what a state says of its splits. Raises ConfigError: not that."""
    try:
        splits = [{name: str(split[name]) for name in ("name", "version")} for split in state["mixture"]["splits"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"this is no state of a mixture: it says of it {state.get('mixture')!r}") from error
    return list(splits)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0

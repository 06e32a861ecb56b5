"""Saves and restores the state of a loader as JSON values: its position, and the samples and order that it reads.

The state of a single split is an `OrderState`; this module defines the state of a mixture. A state of other samples
or another order is refused, because its position would refer to other samples.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders.core.mixture import Mixture, name_of
from datasvc.loaders.core.split_reader import Cursor
from datasvc.mix_schedule import past_of
from datasvc.order import LOADER_SETTINGS, OrderConfig, OrderState
from datasvc.shards import Split
from datasvc.shards.versions.version_entry import name_table

MIXTURE_STATE_FORMAT: Final = 2
"""Of a mixture with stages; that of a mixture without is 1."""
DECODE: Final = "decode"
"""Field of the decoding backend in the state of an image loader; older states do not have it."""
EVALUATION: Final = "evaluation"
"""Field of `AugmentConfig.evaluation` in the state of an image loader that evaluates; older states do not have it."""
DECODE_SCALE: Final = "decode_scale"
"""Field of `DecodeConfig.decode_scale` in the state of an image loader that reduces it; without it, "full"."""
# The batches and the cursor depend on these attributes, so they are set once.
_FIXED: Final = frozenset({"split", "batch_size", "training", "tail", "ranks"})
_FORMAT_FIELD: Final = "mixture_format"
_CURSOR_FIELDS: Final = ("epoch", "position")
_STAGES: Final = "mixture.stages"
_CHANGING: Final = frozenset({_FORMAT_FIELD, "mixture.splits", "mixture.weights", _STAGES})


def save_state(samples: Split | Mixture, order: OrderConfig, cursor: Cursor) -> dict[str, Any]:
    """Return the state of a loader that reads `samples` in `order` and is at `cursor`."""
    if isinstance(samples, Mixture):
        state_format = MIXTURE_STATE_FORMAT if samples.stages else 1
        progress = {_FORMAT_FIELD: state_format, "epoch": cursor.epoch, "position": cursor.position}
        return progress | {"mixture": samples.describe()} | dataclasses.asdict(order)
    return OrderState(samples.digest, cursor.epoch, cursor.position, order).to_dict()


def restore_state(state: Mapping[str, Any], samples: Split | Mixture, order: OrderConfig) -> Cursor:
    """Return the cursor of a state.

    Raises:
        ConfigError: `state` is no loader state, or has a later format.
        StateMismatchError: the state belongs to other samples, weights or another order; the message has both. The
            weights after the position of the state, and splits that are served only there, may differ.
    """
    # A state with other settings of images or other masks is accepted: the loader uses them, or logs a warning.
    state = {name: value for name, value in state.items() if name not in LOADER_SETTINGS}
    if isinstance(samples, Mixture):
        return _restore_mixture(state, samples, order)
    if _FORMAT_FIELD in state:
        raise StateMismatchError(
            f"the state belongs to a mixture of {_describe(state)}, this loader reads {samples!r} alone; give the "
            "loader that mixture"
        )
    order_state = OrderState.from_dict(state)
    order_state.check_matches(
        samples.digest, order, samples.num_positions, name_table=partial(name_split_table, samples)
    )
    return Cursor(order_state.epoch, order_state.position)


def changed_fields(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values."""
    fields = {field.name: (getattr(settings, field.name), field.default) for field in dataclasses.fields(settings)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in fields.items()
        if value != default
    }


def name_split_table(split: Split, digest: str) -> str:
    """Return the name, such as "pets@1/train", of the split whose shard table has `digest`."""
    if digest == split.digest:
        return name_of(split)
    return name_table(split.repository, digest, dataset=split.dataset.partition("@")[0])


def _restore_mixture(state: Mapping[str, Any], samples: Mixture, order: OrderConfig) -> Cursor:
    """Return the cursor of a state for the loader of a mixture; for errors, see `restore_state`."""
    expected = save_state(samples, order, Cursor(0, 0))
    if _FORMAT_FIELD not in state:
        single = OrderState.from_dict(state)
        raise StateMismatchError(
            f"the state belongs to one split, {name_split_table(samples.splits[0], single.version)}, this loader "
            f"reads {samples!r}; give the loader that split"
        )
    if state[_FORMAT_FIELD] not in (1, MIXTURE_STATE_FORMAT):
        raise ConfigError(
            f"this state of a mixture has format {state[_FORMAT_FIELD]}; this datasvc reads the formats 1 and "
            f"{MIXTURE_STATE_FORMAT}: upgrade datasvc"
        )
    is_complete = state.keys() == expected.keys() and all(_is_count(state[name]) for name in _CURSOR_FIELDS)
    if not is_complete or (_fields(state).keys() ^ _fields(expected).keys()) - {_STAGES}:
        raise ConfigError(
            f"this is no state of a mixture: expected the fields {sorted(_fields(expected))}, with integers of at "
            f"least 0 for epoch and position; found {dict(state)}"
        )
    _check_same(state, expected)
    cursor = Cursor(state["epoch"], state["position"])
    if cursor.position > samples.num_positions:
        raise StateMismatchError(
            f"the state's position {cursor.position} is outside 0..{samples.num_positions}; restore another state"
        )
    return cursor


def _check_same(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise StateMismatchError if the states differ in more than the cursor, names of splits, and what is ahead."""
    saved, present = _fields(state), _fields(expected)
    has_stages = _STAGES in saved or _STAGES in present
    if _versions(state) != _versions(expected) and not has_stages:
        # With equal names, show the shard tables: two repositories may have different versions of one name.
        with_tables = _describe(state) == _describe(expected)
        in_state, here = (_describe(each, with_tables=with_tables) for each in (state, expected))
        raise StateMismatchError(
            f"the state belongs to a mixture of {in_state}, this loader reads one of {here}; "
            "mix the versions that the state was saved with, in their order"
        )
    changing = _CHANGING if has_stages else {"mixture.splits"}
    differing = [
        name for name in present if name not in (*_CURSOR_FIELDS, *changing) and saved[name] != present[name]
    ]
    if differing:
        in_state = ", ".join(f"{name}={saved[name]!r}" for name in differing)
        here = ", ".join(f"{name}={present[name]!r}" for name in differing)
        later = (
            " To change the weights from here on, give Mixture stages." if differing == ["mixture.weights"] else ""
        )
        raise StateMismatchError(
            f"the state of a mixture of {_describe(state)} was saved with {in_state}, this loader has {here}; give "
            f"the mixture and the loader the arguments that the state was saved with.{later}"
        )
    if has_stages:
        _check_past(state, expected["mixture"])


def _check_past(state: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise StateMismatchError if the blocks up to the position of a state differ in a mixture; see `_check_same`."""
    saved, block = state["mixture"], present["block"]
    line = state["epoch"] * present["epoch_samples"] + state["position"]
    num_blocks = max(1, -(-line // block))  # a block that has begun is past: its samples are assigned already
    try:
        before, here = (past_of(mixture, num_blocks) for mixture in (saved, present))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no state of a mixture: its stages are not valid: {error!r}") from error
    if before == here:
        return
    names = {split["version"]: split["name"] for mixture in (present, saved) for split in mixture["splits"]}
    index = next(
        (index for index, pair in enumerate(zip(before, here, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(here)),
    )
    in_state, given = (_describe_piece(past[index : index + 1], block, names) for past in (before, here))
    first, ramp, _ = before[-1]
    free = max(num_blocks, first + (ramp or 0)) * block  # a ramp that has begun is finished
    raise StateMismatchError(
        f"the state is at sample {line:,} of the mixture, and was saved with {in_state}; this mixture has {given}. "
        f"The first {free:,} samples cannot be changed: give the weights that the state was saved with, and stages "
        f"that differ only after {free:,} samples"
    )


def _describe_piece(pieces: Sequence[tuple[Any, ...]], block: int, names: Mapping[str, str]) -> str:
    """Return the weights of the first of `pieces` in words."""
    if not pieces:
        return "no further stage"
    ((first, ramp, weights),) = pieces
    ends = [
        ", ".join(f"{names[digest]} {ends[number]}" for digest, *ends in weights if ends[number]) for number in (0, 1)
    ]
    text = f"the weights {ends[0]} from sample {first * block:,} on"
    return text if ramp is None else f"{text}, and a ramp to {ends[1]} at sample {(first + ramp) * block:,}"


def _fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields in one dict; those of the mixture have names such as "mixture.weights"."""
    other_fields = {name: value for name, value in state.items() if name != "mixture"}
    mixture = state["mixture"]
    return other_fields | (
        {f"mixture.{name}": value for name, value in mixture.items()} if isinstance(mixture, Mapping) else {}
    )


def _versions(state: Mapping[str, Any]) -> list[str]:
    # Without the names of the splits: they differ if the same version is opened once by number and once by tag.
    return [split["version"] for split in _splits(state)]


def _describe(state: Mapping[str, Any], *, with_tables: bool = False) -> str:
    return ", ".join(
        split["name"] + (f" (shard table {split['version'][:12]}...)" if with_tables else "")
        for split in _splits(state)
    )


def _splits(state: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Return names and versions of a state's splits. Raises ConfigError: the state does not have them."""
    try:
        splits = [{name: str(split[name]) for name in ("name", "version")} for split in state["mixture"]["splits"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"this is no state of a mixture: expected its splits in the field 'mixture', found "
            f"{state.get('mixture')!r}"
        ) from error
    return list(splits)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # not `isinstance`: True is an int too


class MisuseGuard:
    """Base class of a loader, that refuses what would give other batches than the loader's state says."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and name in self.__dict__:
            advice = f"create another loader with {name}={value!r}, which can load the state of this one"
            raise ConfigError(f"{name} of a loader cannot change: {advice}")
        super().__setattr__(name, value)

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError(
            f"this {type(self).__name__} makes batches and has no samples by number: iterate over it, without a "
            "DataLoader; for a DataLoader use datasvc.loaders.torch.Dataset"
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"this {type(self).__name__} has threads and open files, so it cannot be copied, pickled or sent to "
            "another process: create one there, which can load the state_dict() of this one"
        )


class SingleThreadGuard:
    """A context manager that one thread at a time may enter, in the process that created the manager.

    `with guard` raises ConfigError while another thread is inside the block. It also does so in a forked child,
    because a fork does not copy the threads of decoders and clients.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: an interrupt just after `acquire` may leave the lock held for ever, but the thread that holds it
        # can still use the loader.
        self._in_use = threading.RLock()

    @property
    def is_foreign(self) -> bool:
        """Whether the current process is not the one that created the guard."""
        return os.getpid() != self._pid

    def __enter__(self) -> None:
        if self.is_foreign:
            raise ConfigError(
                "this loader was created before the fork; create one in the child, or spawn instead of forking"
            )
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("this loader is used by another thread; give each thread its own loader")

    def __exit__(self, *error: object) -> None:
        self._in_use.release()

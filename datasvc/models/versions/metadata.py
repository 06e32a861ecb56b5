"""Metadata of a model version: the arguments of a save that describe its state, checked before anything is stored."""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import functools
import math
import operator
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, Final, Literal, get_args
from uuid import UUID

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.tensors.state_tree import flatten
from datasvc.models.versions.architecture import Architecture
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.data_use import DataUse

_MAX_STEP: Final = (1 << 63) - 1  # largest int64
_SHOWN: Final = 5  # names in a warning
_MAX_DEPTH: Final = 100  # levels of nesting; a cycle of values ends here instead of in a RecursionError


Parallelism = Literal["none", "data", "model", "hybrid"]
Consistency = Literal["synchronous", "bounded", "asynchronous"]
Topology = Literal["centralised", "decentralised"]
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "parallelism": get_args(Parallelism),
    "consistency": get_args(Consistency),
    "topology": get_args(Topology),
}
# The names of axes are columns of the search, as in `execution.layout.tensor = 2`.
_AXIS: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class VersionMetadata:
    """Metadata of a version. `save.save` has arguments of the same names, and describes them.

    Values of `config` and `environment` become JSON values, see `json_form`, and metrics floats.

    Raises:
        ConfigError: a value cannot be stored in an entry; the message names it.
    """

    step: int
    data: Sequence[DataUse] = ()
    config: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] | None = None
    parent: str | None = None
    merged: Sequence[str] = ()
    message: str = ""
    code: CodeRevision | None = None
    environment: Mapping[str, Any] | None = None
    execution: Execution | None = None
    run: str | None = None
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.message, str):
            raise ConfigError(f"message is {self.message!r}; expected a string")
        if self.run is not None and not isinstance(self.run, str):
            raise ConfigError(f"run is a {type(self.run).__name__}; expected the reference of a run, such as log.ref")
        if self.execution is not None and not isinstance(self.execution, Execution):
            raise ConfigError(f"execution is a {type(self.execution).__name__}; expected an Execution")
        if self.architecture is not None and not isinstance(self.architecture, Architecture):
            raise ConfigError(
                f"architecture is a {type(self.architecture).__name__}; expected the result of describe_architecture"
            )
        checked = {
            "step": check_step(self.step),
            "data": _check_data(self.data),
            "config": _check_tree(self.config, "config"),
            "metrics": _check_metrics(self.metrics),
            "environment": _check_tree(self.environment, "environment"),
        }
        for name, value in checked.items():
            # The class is frozen, so a converted value cannot be assigned in the usual way.
            object.__setattr__(self, name, value)


def check_step(step: Any) -> int:
    """Return `step` as an int. Raises ConfigError: it is not an integer from 0 to 2**63 - 1."""
    try:
        # `operator.index` also accepts a boolean, which is not a number of steps.
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_STEP:
        raise ConfigError(f"step is {step!r}; expected the number of optimizer steps of the state, 0 or more")
    return number


def _check_data(data: Any) -> tuple[DataUse, ...]:
    """Return an iterable of `DataUse` as a tuple. Raises ConfigError: it has other elements, or is one string."""
    is_list = isinstance(data, Iterable) and not isinstance(data, str | Mapping)
    uses = tuple(data) if is_list else ()
    if not is_list or not all(isinstance(use, DataUse) for use in uses):
        raise ConfigError(f"data is {str(data)[:80]!r}; expected a list of DataUse, such as [tracker.use()]")
    return uses


def _check_metrics(metrics: Any) -> dict[str, float] | None:
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics are {str(metrics)[:80]!r}; expected numbers by name")
    checked = {}
    for name, value in metrics.items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a complex tensor, or one without data
            raise ConfigError(f"metric {name!r} is {str(value)[:80]!r}; expected a number ({error})") from error
    return checked


def _check_tree(value: Any, name: str) -> Any:
    """Return a dict of any depth, or None, converted to JSON types; see `json_form`.

    What has no form is left out, with one warning that names all of it. Raises ConfigError: see `VersionMetadata`.
    """
    if value is None:
        return None
    is_record = isinstance(value, argparse.Namespace) or (is_dataclass(value) and not isinstance(value, type))
    if not (is_record or isinstance(value, Mapping)):
        raise ConfigError(f"{name} is a {type(value).__name__}; expected a dict, such as vars({name})")
    left_out: dict[str, str] = {}
    stored = json_form(value, name, left_out)
    warn_of_left_out(left_out)
    return stored


def warn_of_left_out(left_out: Mapping[str, str]) -> None:
    """Give one warning that names all values that `json_form` has left out; none if there are none."""
    if left_out:
        shown = ", ".join(f"{path} ({kind})" for path, kind in [*left_out.items()][:_SHOWN])
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        warnings.warn(
            f"{shown}{more} cannot be stored in a version and are left out; pass texts or numbers of them, or leave "
            "them out yourself (save_hyperparameters(ignore=[...]) in Lightning)",
            RuntimeWarning,
            stacklevel=3,
        )


_LEFT_OUT: Any = object()


def json_form(value: Any, path: str, left_out: dict[str, str], depth: int = 0) -> Any:
    """Return what an entry has of a value: JSON values.

    NaN and infinities are stored as texts, as in metrics; paths, dates and types of torch as their texts; members of
    an enum as their names; sets as sorted lists; namespaces and data classes as dicts; functions and classes as their
    full names, a `functools.partial` as a dict of its function and arguments. `left_out` gets the type of any other
    value by its path. Raises ConfigError: it is nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{path[:60]}... is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return value.name or str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, functools.partial):
        value = {"function": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, argparse.Namespace | SimpleNamespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        # With `slots=True` there is no `vars`; without, it may have more than the fields.
        by_field = {field.name: getattr(value, field.name, None) for field in fields(value)}
        value = {**by_field, **getattr(value, "__dict__", {})}
    elif isinstance(value, set | frozenset):
        value = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
        return _stored_items(((str(key), f"{path}.{key}", item) for key, item in items), left_out, depth)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        numbered = ((number, f"{path}.{number}", item) for number, item in enumerate(value))
        return [*_stored_items(numbered, left_out, depth).values()]
    if isinstance(value, PurePath | dt.date | dt.time | dt.timedelta | UUID | Decimal | Fraction | complex | range):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "layout", "memory_format"):
        return str(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    left_out[path] = f"{type(value).__module__}.{type(value).__qualname__}"
    return _LEFT_OUT


def _stored_items(items: Iterable[tuple[Any, str, Any]], left_out: dict[str, str], depth: int) -> dict[Any, Any]:
    """Return the stored forms of `items`, triples of key, path and value, by key."""
    formed = {key: json_form(item, path, left_out, depth + 1) for key, path, item in items}
    return {key: item for key, item in formed.items() if item is not _LEFT_OUT}


def state_forms(values: Mapping[Any, Any], path: str, left_out: dict[str, str]) -> dict[Any, Any]:
    """Return `values` with the JSON forms of those that a state cannot have without pickle; see `json_form`."""
    stored = {}
    for key, value in values.items():
        try:
            flatten(value)
            stored[key] = value
        except ConfigError:
            stored |= _stored_items([(key, f"{path}.{key}", value)], left_out, 0)
    return stored


# The axes are those of Langer et al., "Distributed Training of Deep Learning Models: A Taxonomic Perspective" (IEEE
# TPDS 2020): what is divided, when updates reach the ranks, who computes them, and how they are exchanged.


@dataclass(frozen=True)
class Execution:
    """How the ranks of a run computed its steps.

    Attributes:
        layout: number of parts into which each axis divides the ranks, by axis, such as {"data": 2, "tensor": 4}.
        parallelism: what is divided: "data", "model" (layers, stages or activations), "hybrid" (both) or "none".
        consistency: "synchronous" if every step uses the updates of all ranks; "bounded" if they may be late by a
            limited number of steps; else "asynchronous".
        topology: "decentralised" if the ranks compute the updates themselves, as with all-reduce; "centralised" if
            a parameter server does.
        communication: how updates are exchanged, such as "all-reduce"; "" if there is one rank.
        sync: who waits for whom, such as "bsp" or "local:8", as in docs/explanation/waiting.md; "": not recorded.
        sync_steps: optimizer steps between two rounds of a parameter, of all ranks; 0: not recorded.
        outer_optimizer: what the exchanges do beside averaging: "nesterov", "center", or "".
        staleness: of parameter servers, largest number of steps by which a worker may be ahead of the slowest; None:
            no bound, or no servers.
        tournament: rounds and last comparison of replicas, as `optimizer.tournament.describe()` of
            `datasvc.trainer.Averaging` returns them: the field `tournament` of the entry.

    Raises:
        ConfigError: a value is not one of those that are listed above.
    """

    layout: Mapping[str, int] = field(default_factory=dict)
    parallelism: Parallelism = "data"
    consistency: Consistency = "synchronous"
    topology: Topology = "decentralised"
    communication: str = "all-reduce"
    sync: str = ""
    sync_steps: int = 0
    outer_optimizer: str = ""
    staleness: int | None = None
    tournament: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for axis, size in self.layout.items():
            if not (isinstance(axis, str) and _AXIS.fullmatch(axis) and type(size) is int and size >= 1):
                raise ConfigError(
                    f"layout has {axis!r}: {size!r}; expected an axis in lower case, and a size of 1 or more"
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        for name, example in (("communication", "all-reduce"), ("sync", "local:8"), ("outer_optimizer", "nesterov")):
            if not isinstance(text := getattr(self, name), str):
                raise ConfigError(f"{name} is {text!r}; expected a text such as {example!r}")
        if type(self.sync_steps) is not int or self.sync_steps < 0:
            raise ConfigError(f"sync_steps is {self.sync_steps!r}; expected a number of steps, 0 or more")
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            raise ConfigError(f"staleness is {self.staleness!r}; expected a number of steps, 0 or more, or None")
        object.__setattr__(self, "tournament", _check_tree(self.tournament, "tournament"))

    def to_dict(self) -> dict[str, Any]:
        """Return the field `execution` of an entry, which lacks `tournament`."""
        averaging = {name: getattr(self, name) for name in ("sync", "sync_steps", "outer_optimizer", "staleness")}
        # As texts, because earlier releases accept no other values here. A default stands for what is not recorded.
        recorded = {name: str(value) for name, value in averaging.items() if value != getattr(Execution, name)}
        return {
            **{name: value for name, value in vars(self).items() if name not in (*averaging, "tournament")},
            **recorded,
            "layout": dict(self.layout),
        }

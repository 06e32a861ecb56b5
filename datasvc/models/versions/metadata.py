"""Metadata of a model version: the arguments of a save that describe its state, checked before anything is stored."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from datasvc.errors import ConfigError
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.execution import Execution

_MAX_STEP: Final = (1 << 63) - 1  # largest int64
_MAX_DEPTH: Final = 100  # levels of nesting; a cycle of values ends here instead of in a RecursionError


@dataclass(frozen=True)
class VersionMetadata:
    """Metadata of a version. `save.save` has arguments of the same names, and describes them.

    Numpy scalars are converted to Python numbers, and metrics to floats.

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

    def __post_init__(self) -> None:
        if not isinstance(self.message, str):
            raise ConfigError(f"message is {self.message!r}; expected a string")
        if self.run is not None and not isinstance(self.run, str):
            raise ConfigError(f"run is a {type(self.run).__name__}; expected the reference of a run, such as log.ref")
        if self.execution is not None and not isinstance(self.execution, Execution):
            raise ConfigError(f"execution is a {type(self.execution).__name__}; expected an Execution")
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
    """Return a dict of any depth, or None, converted to JSON types. Raises ConfigError: see `VersionMetadata`."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a {type(value).__name__}; expected a dict, such as vars({name})")
    return _json_value(value, name, 0)


def _json_value(value: Any, path: str, depth: int) -> Any:
    """Return a value converted to JSON types; `path` names it in messages."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{path[:60]}... is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} is {value}, which JSON cannot represent; store it as a string")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise ConfigError(f"{path} has the key {key!r}; expected a string")
        return {str(key): _json_value(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_json_value(item, f"{path}.{number}", depth + 1) for number, item in enumerate(value)]
    raise ConfigError(f"{path} is a {type(value).__name__}; expected a JSON value, such as str() of it")

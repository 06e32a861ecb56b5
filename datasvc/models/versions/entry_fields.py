"""Checks the fields of the entry of a model version, so that code that reads a checked entry need not check types.

An entry with a valid checksum may still have a field of a wrong type, if another program wrote it. Fields that are
not in `_FIELDS` are not checked, because a later datasvc may add them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from datasvc.errors import CorruptDataError, UnreadableVersionWarning
from datasvc.repository import Digest, Entry, Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import keep_valid

_MAX_COUNT: Final = (1 << 63) - 1  # of an int64, as in the version index
# `VersionMetadata` accepts 100 levels below a field; a loader state and other fields are far flatter.
_MAX_DEPTH: Final = 120
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN: Final = 60  # characters of a wrong value in a message


# Readers refuse larger objects, so that a damaged entry cannot exhaust the memory. The limit of the sharding allows
# as many blocks as a tensor table may have chunks.
MAX_SHARDING_BYTES: Final = 512 << 20
MAX_CODE_BYTES: Final = 64 << 20


TRACKERS: Final = ("mlflow", "wandb")


class _FieldRule(NamedTuple):
    """Rule for a field; `expected` describes its valid values in messages."""

    is_valid: Callable[[Any], bool]
    expected: str
    is_required: bool = True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT  # `isinstance` would accept a boolean


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_metric, value.values()))


def _is_metric(value: Any) -> bool:
    # Integers of JSON are unbounded, but a metric must fit a float. NaN and infinities are stored as text.
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 1 << 1023)


def _is_counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_count, value.values()))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_data(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_use, value))


def _is_use(use: Any) -> bool:
    return (
        isinstance(use, Mapping)
        and isinstance(use.get("dataset"), str)
        and isinstance(use.get("split"), str)
        and isinstance(use.get("state"), Mapping)
        and isinstance(use.get("purpose", ""), str)
    )


def _is_code(code: Any) -> bool:
    return (
        isinstance(code, Mapping)
        and all(_is_text_or_none(code.get(name)) for name in ("revision", "remote", "diff_kind"))
        and (code.get("diff") is None or _is_digest(code["diff"]))
        and isinstance(code.get("dirty", False), bool)
        and _is_texts(code.get("untracked", []))
        and _is_count(code.get("num_untracked", 0))
        and isinstance(code.get("submodules", {}), Mapping)
    )


def _is_environment(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(name, {}), Mapping) for name in ("packages", "gpus")
    )


def _is_execution(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and _is_counts(value.get("layout", {}))
        and all(_is_text(item) for name, item in value.items() if name != "layout")
    )


_FIELDS: Final[Mapping[str, _FieldRule]] = {
    "commit": _FieldRule(_is_text, "a text"),
    "created": _FieldRule(_is_text, "a text"),
    "message": _FieldRule(_is_text, "a text"),
    "step": _FieldRule(_is_count, "an integer from 0 to 2**63 - 1"),
    "tensors": _FieldRule(_is_digest, "a digest of 64 hex digits"),
    "state": _FieldRule(_is_digest, "a digest of 64 hex digits"),
    "num_tensors": _FieldRule(_is_count, "an integer from 0 on"),
    "bytes": _FieldRule(_is_count, "an integer from 0 on"),
    "metrics": _FieldRule(_is_metrics, "numbers by name"),
    "config": _FieldRule(_is_mapping, "values by name"),
    "data": _FieldRule(_is_data, "a list of data uses with dataset, split and state"),
    "code": _FieldRule(_is_code, "a description of a revision"),
    "parent": _FieldRule(_is_text_or_none, "a text or null", is_required=False),
    "merged": _FieldRule(_is_texts, "a list of texts", is_required=False),
    "environment": _FieldRule(_is_environment, "values by name", is_required=False),
    "run": _FieldRule(_is_text, "a text", is_required=False),
    "execution": _FieldRule(_is_execution, "a layout of counts, and texts by name", is_required=False),
    "tournament": _FieldRule(_is_mapping, "values by name", is_required=False),
    "modules": _FieldRule(_is_counts, "counts by class", is_required=False),
    "ops": _FieldRule(_is_counts, "counts by operator", is_required=False),
    "stored_bytes": _FieldRule(_is_count, "an integer from 0 on", is_required=False),
    "num_nonfinite": _FieldRule(_is_counts, "counts by tensor", is_required=False),
    "content": _FieldRule(_is_text, "a text", is_required=False),
    "branch": _FieldRule(_is_text, "a text", is_required=False),
    "sharding": _FieldRule(_is_digest, "a digest of 64 hex digits", is_required=False),
    "duration": _FieldRule(_is_mapping, "values by name", is_required=False),
    "imported": _FieldRule(_is_mapping, "values by name", is_required=False),
    "origin": _FieldRule(_is_mapping, "values by name", is_required=False),
}


def check_fields(content: Mapping[str, Any], version: object) -> None:
    """Raise CorruptDataError if a field of the entry of `version` is missing or has a wrong type."""
    problems = find_wrong_fields(content)
    if problems:
        raise CorruptDataError(f"the entry of {version} is not valid: {'; '.join(problems.values())}")


def valid_entries(name: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of the model `name` that `check_fields` accepts; warn about the others."""
    return keep_valid("models", name, entries, check_fields)


def has_valid_fields(name: str, entry: Entry, effect: str) -> bool:
    """Return whether `check_fields` accepts an entry of the model `name`; if not, warn of it and of its `effect`."""
    version = Resolved("models", name, entry.number)
    try:
        check_fields(entry.content, version)
    except CorruptDataError as error:
        warnings.warn(UnreadableVersionWarning(str(version), f"{error}; {effect}"), stacklevel=2)
        return False
    return True


def find_wrong_fields(content: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each field that is missing or has a wrong type, what was expected and what was found."""
    problems = {}
    for name, field in _FIELDS.items():
        if name not in content:
            if field.is_required:
                problems[name] = f"field {name!r} is missing"
        elif _is_too_deep(content[name]):
            problems[name] = f"field {name!r} is nested deeper than {_MAX_DEPTH} levels"
        elif not field.is_valid(content[name]):
            problems[name] = f"field {name!r} is {_shorten(content[name])}; expected {field.expected}"
    return problems


def read_step(content: Mapping[str, Any], version: object) -> int:
    """Return the number of optimizer steps in an entry. Raises CorruptDataError: there is no valid one."""
    step: Any = content.get("step")
    if not _is_count(step):
        raise CorruptDataError(
            f"the entry of {version} is not valid: field 'step' is {_shorten(step)}; expected an integer from 0 on"
        )
    return int(step)


def _is_too_deep(value: Any) -> bool:
    stack = [(value, 0)]
    while stack:  # not recursion: the value may be nested deeper than Python's recursion limit
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:
            return True
        children: Iterable[Any]
        if isinstance(item, Mapping):
            children = item.values()
        elif isinstance(item, list):
            children = item
        else:
            continue
        stack.extend((child, depth + 1) for child in children if isinstance(child, Mapping | list))
    return False


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def tree_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path, below `path`, and the value of each leaf of a tree of JSON values."""
    # An empty mapping below the root is a leaf, so that adding or removing it is a change.
    if isinstance(value, Mapping) and (value or not path):
        for key, child in value.items():
            yield from tree_leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# Also defines size limits of these objects, which writers and readers share.


@dataclass(frozen=True)
class EntryObjects:
    """Digests of the objects that an entry names. One of these objects, the tensor table, names further objects.

    Attributes:
        tensors: tensor table.
        state: state object, which has the skeleton.
        sharding: sharding of a save by several ranks; None for a save by one process.
        code: local changes of the code; None if there were none or they were not stored.
    """

    tensors: Digest
    state: Digest
    sharding: Digest | None
    code: Digest | None

    @property
    def all(self) -> tuple[Digest, ...]:
        """All digests, each once."""
        digests = (self.tensors, self.state, self.sharding, self.code)
        return tuple(dict.fromkeys(digest for digest in digests if digest is not None))


def objects_of_entry(content: Mapping[str, Any], version: object) -> EntryObjects:
    """Return the objects that the entry of a model version names; `version` is for messages.

    Raises CorruptDataError: a field is missing, or a value is not a digest.
    """
    try:
        sharding, code = content.get("sharding"), (content.get("code") or {}).get("diff")
        return EntryObjects(
            parse_digest(content["tensors"]),
            parse_digest(content["state"]),
            None if sharding is None else parse_digest(sharding),
            None if code is None else parse_digest(code),
        )
    except (KeyError, TypeError, AttributeError, CorruptDataError) as error:
        raise CorruptDataError(f"the entry of {version} does not name its tensors and state: {error!r}") from error


# The runs of experiment trackers that a version belongs to. `datasvc train --log-to` and `datasvc.integrations` write
# and read them alike, so that each continues the run of the other. A tracker has one active run in a process, and so
# one field.


def config_of_run(tracker: str, run_id: str) -> dict[str, str]:
    """Return the field by which the configuration of a version names a run of a tracker of `TRACKERS`."""
    assert tracker in TRACKERS, tracker
    return {f"{tracker}_run": run_id}


def runs_in_config(config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the ids of the runs that the configuration of a version names, by tracker."""
    fields = {tracker: (config or {}).get(f"{tracker}_run") for tracker in TRACKERS}
    return {tracker: run_id for tracker, run_id in fields.items() if isinstance(run_id, str)}

"""Compares the metadata of several model versions value by value; `diff` compares two versions with their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.models.registry.registry import ModelVersion, describe_versions
from datasvc.models.versions.entry_fields import tree_leaves
from datasvc.repository import Repository
from datasvc.repository.logs.references import refuse_text
from datasvc.shown import ShownTable, rows_to_arrow

_PARTS: Final = ("step", "config", "metrics", "data", "code")
# The data-set version tells what the digest of its shard table tells; the format is no property of the training.
_UNCOMPARED: Final = {"version", "format"}


@dataclass(frozen=True)
class ComparedValue:
    """A value of several versions.

    Attributes:
        name: dotted path, such as "config.optimizer.lr" or "data.pets/train.epoch".
        values: value by version; without the versions that do not have it.
    """

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class VersionComparison(ShownTable):
    """Values in which model versions differ.

    Attributes:
        versions: the versions, in the order of the references.
        values: the values: first the step, then those of configuration, metrics, data and code.
    """

    versions: tuple[str, ...]
    values: tuple[ComparedValue, ...]

    def to_arrow(self) -> pa.Table:
        """Return a row for each version: its name, `version`, and a column for each value; null where it has none."""
        return rows_to_arrow(
            [{"version": name} | {row.name: row.values.get(name) for row in self.values} for name in self.versions]
        )


def compare_versions(repository: Repository, refs: Sequence[str], *, equal: bool = False) -> VersionComparison:
    """Compare step, configuration, metrics, data and code of two or more versions, of one or several models.

    Versions that cannot be read are left out with an `UnreadableVersionWarning`.

    Args:
        repository: repository of the versions.
        refs: references; a version that is named twice is compared once.
        equal: also return the values that are the same in all versions.

    Raises:
        ConfigError: a reference is not valid, or there are fewer than two versions.
        NotFoundError: a version does not exist.
        UnavailableError: the store does not respond.
    """
    refuse_text(refs, "refs")
    resolved = list(dict.fromkeys(repository.resolve("models", ref, removed=True) for ref in refs))
    if len(resolved) < 2:
        found = ", ".join(map(str, resolved)) or "none"
        raise ConfigError(f"expected two or more versions to compare, found {found}; give more references")
    return _compare(describe_versions(repository, resolved), equal=equal)


def _compare(versions: Sequence[ModelVersion], *, equal: bool) -> VersionComparison:
    leaves = {str(version): dict(_leaves(version.entry)) for version in versions}
    names = dict.fromkeys(name for values in leaves.values() for name in values)
    # Sorted by part only: within a part, the names keep the order in which the run recorded them.
    names_by_part = sorted(names, key=lambda name: _PARTS.index(name.partition(".")[0]))
    rows = (
        ComparedValue(name, {version: values[name] for version, values in leaves.items() if name in values})
        for name in names_by_part
    )
    return VersionComparison(tuple(leaves), tuple(row for row in rows if equal or _differs(row, len(leaves))))


def _differs(row: ComparedValue, num_versions: int) -> bool:
    first, *others = row.values.values()
    # In Python 1 == 1.0 == True; in a configuration they are different values.
    return len(row.values) < num_versions or any(value != first or type(value) is not type(first) for value in others)


def _leaves(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "step", entry["step"]
    trees = {"config": entry["config"], "metrics": entry["metrics"], "data": _data(entry["data"])}
    for part, tree in (trees | {"code": entry["code"]}).items():
        # An empty tree has no values, unlike an empty mapping in a configuration.
        if tree:
            yield from tree_leaves(tree, part)


def _data(uses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data uses by a name without versions, so that the uses of several versions are comparable.

    Of several uses with one name, that of the lowest version has this name, whatever their order; the others have a
    name with the version, and with a number if this is taken too.
    """
    indexes: dict[str, int] = {}
    # A shorter reference has a lower version: pets@2 is before pets@10.
    for index in sorted(range(len(uses)), key=lambda index: (len(uses[index]["dataset"]), uses[index]["dataset"])):
        name = next(name for name in _use_names(uses[index]) if name not in indexes)
        indexes[name] = index
    data: dict[str, Any] = {}
    for name, index in sorted(indexes.items(), key=lambda item: item[1]):
        use = uses[index]
        state = {field: value for field, value in use["state"].items() if field not in _UNCOMPARED}
        data[name] = {"dataset": use["dataset"], **state}
    return data


def _use_names(use: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names for a data use, the preferred one first; without end."""
    purpose = use.get("purpose", "training")
    suffix = "" if purpose == "training" else f" ({purpose})"
    names = ", ".join(ref.partition("@")[0] for ref in use["dataset"].split(", "))
    yield f"{names}/{use['split']}{suffix}"
    yield f"{use['dataset']}/{use['split']}{suffix}"
    yield from (f"{use['dataset']}/{use['split']}{suffix} #{number}" for number in count(2))

"""Restores a version into a given state tree: tensors are filled in place, and a sharded tensor only on its own part.

A rank reads only the chunks that overlap its parts. How the version was saved does not matter: by one process or by
many ranks, and with another sharding.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from datasvc.errors import ConfigError
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.fit import LoadReport, Mismatch, TensorSpec
from datasvc.models.tensors.chunks import Box
from datasvc.models.tensors.container_types import kind_of, untyped
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.models.tensors.read import load_tensors, plan_reads, read_chunks
from datasvc.models.tensors.state_tree import dict_parts, flatten, unflatten
from datasvc.models.tensors.tensor_classes import inner_tensors, local_part, memory_of
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.tensors.value_types import is_named_tuple
from datasvc.progress import Progress

if TYPE_CHECKING:
    import torch

_ABSENT: Any = object()


@dataclass(frozen=True)
class _Target:
    """A tensor to fill: its path in the tree, this rank's part of it, and the record of the stored tensor."""

    path: str
    part: torch.Tensor
    box: Box | None
    record: TensorRecord


def fill_state(
    into: Any,
    copies: StoredCopies,
    skeleton: Any,
    records: Mapping[str, TensorRecord],
    version: str,
    progress: Progress,
) -> tuple[Any, list[TensorRecord]]:
    """Fill the tensors of `into` in place; return the restored tree, and the records of the chunks that were read.

    Args:
        into: state tree; see the argument `into` of `restore.restore`.
        copies: places to read from.
        skeleton: skeleton of the stored state.
        records: stored tensors by name.
        version: name of the version, for messages.
        progress: counts the bytes of each chunk that was read.

    Raises:
        ConfigError: the version lacks a tensor of `into`, or has it with another dtype or shape (the message lists
            these in a table); or a tensor of `into` has no memory, or cannot be filled. Nothing was changed.
        CorruptDataError, NotFoundError, UnavailableError: see `load_tensors`. Tensors may be filled in part.
    """
    targets, used = _plan(into, skeleton, records, version)
    _check_tied(targets)
    reads = plan_reads((target.record, target.box, target.part) for target in targets if target.box is not None)
    needed = [*(replace(read.record, chunks=(read.chunk,)) for read in reads), *used]
    progress.begin(sum([record.chunk_bytes(chunk) for record in needed for chunk in record.chunks]))
    with copies.open_source(needed) as source:
        read_chunks(source, reads, progress)
        tensors = load_tensors(source, used, progress=progress)
    return _assemble(into, skeleton, "", tensors, lambda _path, target, _skeleton: target), needed


def _plan(
    into: Any, skeleton: Any, records: Mapping[str, TensorRecord], version: str
) -> tuple[list[_Target], list[TensorRecord]]:
    """Return the tensors to fill, and the records of the other tensors that the restored tree will have."""
    targets: list[_Target] = []
    missing: dict[str, TensorSpec] = {}
    mismatched: list[Mismatch] = []

    def plan_target(path: str, target: torch.Tensor, stored: Any) -> None:
        expected = TensorSpec(dtype_name(target), tuple(target.shape))
        record = None
        if stored is _ABSENT:
            # The stored tree may be nested in another way, as a flattened optimizer state is; then the name is equal.
            record = records.get(path)
        elif isinstance(stored, dict) and "$tensor" in stored:
            record = records.get(stored["$tensor"])
        if record is None:
            missing[path] = expected
            return
        found = TensorSpec(record.dtype, record.shape)
        if found != expected:
            mismatched.append(Mismatch(path, expected, found))
            return
        if target.is_meta:
            raise ConfigError(f"{path} has no memory yet; call to_empty(device=...) of its module before the restore")
        targets.append(_Target(path, *local_part(path, target), record))

    used = UsedRecords(records)
    _assemble(into, skeleton, "", used, plan_target)
    if missing or mismatched:
        report = LoadReport(tuple(target.path for target in targets), missing, {}, tuple(mismatched))
        raise ConfigError(
            f"{version} does not fit the state to restore into, nothing was restored: {report}\n"
            "pass the state of the same model and optimizer, with the names that it was saved with"
        )
    return targets, list(used.values())


def _check_tied(targets: list[_Target]) -> None:
    """Raise ConfigError if tensors that share memory, such as tied weights, are stored with different values."""
    first: dict[Any, _Target] = {}
    for target in targets:
        part = target.part
        if target.box is None:
            continue
        other = first.setdefault(memory_of(part) or target.path, target)
        boxes, other_boxes = ([chunk.box for chunk in each.record.chunks] for each in (target, other))
        if boxes == other_boxes and target.record.content != other.record.content:
            raise ConfigError(
                f"{other.path!r} and {target.path!r} share memory, but the version has different values for them; "
                "restore into a model in which they are not tied, or leave one of them out"
            )


def _assemble(
    into: Any,
    skeleton: Any,
    path: str,
    tensors: Mapping[str, Any],
    visit: Callable[[str, torch.Tensor, Any], Any],
) -> Any:
    """Return `into` with stored values: `visit(path, tensor, skeleton)` returns tensors, `unflatten` the others."""
    import torch

    if isinstance(into, torch.Tensor):
        inner = inner_tensors(into)
        if inner is None:
            return visit(path, into, skeleton)
        _check_same_class(path, into, skeleton)
        stored = _children(_children(skeleton).get("inner"))
        for name, tensor in inner.items():
            _assemble(tensor, stored.get(name, _ABSENT), f"{path}.inner.{name}", tensors, visit)
        return into
    if path and not _has_tensors(into):  # at the root, only the keys of `into` are restored
        return into if skeleton is _ABSENT else unflatten(skeleton, tensors)
    children = _children(skeleton)

    def assemble_child(key: Any, child: Any) -> Any:
        return _assemble(child, children.get(key, _ABSENT), f"{path}.{key}" if path else str(key), tensors, visit)

    if isinstance(into, Mapping):
        restored_dict = {key: assemble_child(key, child) for key, child in into.items()}
        # Settings beside tensors, such as a step count in the state of a parameter, need not be in `into`.
        more = {key: child for key, child in children.items() if path and key not in into and _is_plain(child)}
        restored_dict |= {key: unflatten(child, tensors) for key, child in more.items()}
        if type(into) not in (OrderedDict, Counter, defaultdict):
            return restored_dict
        # A copy keeps what else a dict has, such as the factory of a defaultdict.
        restored_copy: Any = copy(into)
        restored_copy.clear()
        restored_copy.update(restored_dict)
        return restored_copy
    restored = [assemble_child(index, child) for index, child in enumerate(into)]
    if isinstance(into, tuple):
        return tuple.__new__(type(into), restored) if is_named_tuple(into) else tuple(restored)
    return restored


def _check_same_class(path: str, into: torch.Tensor, skeleton: Any) -> None:
    """Raise ConfigError if a wrapper is stored with another class or other settings, such as a group size.

    Its inner tensors would get values that mean something else there.
    """
    if kind_of(skeleton) is None:
        return  # the inner tensors are missing, or found by their names
    expected, _ = flatten(into)
    plain, kind, *details = skeleton["$typed"]
    found = [kind, *details, untyped(plain).get("context")]
    described = [*expected["$typed"][1:], expected["$typed"][0]["context"]]
    if json.dumps(found) != json.dumps(described):
        raise ConfigError(
            f"{path} is a {type(into).__name__} with the settings {json.dumps(described)[:400]}, but is stored as "
            f"{json.dumps(found)[:400]}; nothing was restored. Make the state with the settings of the version"
        )


def _has_tensors(value: Any) -> bool:
    import torch

    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _is_plain(skeleton: Any) -> bool:
    """Return whether a part of a skeleton has no tensors."""
    if isinstance(skeleton, dict):
        return "$tensor" not in skeleton and all(map(_is_plain, skeleton.values()))
    return not isinstance(skeleton, list) or all(map(_is_plain, skeleton))


def _children(skeleton: Any) -> dict[Any, Any]:
    """Return the children of a dict, list or tuple in a skeleton, by key or index; {} for any other value."""
    skeleton = untyped(skeleton)
    if isinstance(skeleton, dict) and "$tuple" in skeleton:
        skeleton = skeleton["$tuple"]
    if isinstance(skeleton, list):
        return dict(enumerate(skeleton))
    return dict_parts(skeleton) or {}


class UsedRecords(dict[str, Any]):
    """The records that were looked up, by tensor name. A look-up takes a record from `records` and adds it."""

    def __init__(self, records: Mapping[str, TensorRecord]) -> None:
        super().__init__()
        self._records = records

    def __missing__(self, name: str) -> TensorRecord:
        self[name] = record = self._records[name]
        return record

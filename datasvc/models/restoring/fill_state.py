"""Restores a version into a given state tree: tensors are filled in place, and a sharded tensor only on its own part.

A rank reads only the chunks that overlap its parts. How the version was saved does not matter: by one process or by
many ranks, and with another sharding.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from datasvc.errors import ConfigError
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.fit import LoadReport, Mismatch, TensorSpec
from datasvc.models.restoring.report import shorten
from datasvc.models.tensors.chunks import Box
from datasvc.models.tensors.container_types import kind_of, untyped
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.models.tensors.name_filter import is_selected, select_names
from datasvc.models.tensors.read import load_tensors, plan_reads, read_chunks
from datasvc.models.tensors.state_tree import dict_parts, flatten, unflatten
from datasvc.models.tensors.tensor_classes import inner_tensors, local_part, memory_of
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.tensors.value_types import is_named_tuple
from datasvc.progress import Progress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_ABSENT: Any = object()


@dataclass(frozen=True)
class _Target:
    """A tensor to fill: its path in the tree, this rank's part of it, and the record of the stored tensor."""

    path: str
    part: torch.Tensor
    box: Box | None
    record: TensorRecord


class Filled(NamedTuple):
    """Result of `fill_state`.

    Attributes:
        state: restored tree.
        read: records of the chunks that were read.
        kept: tensors of the tree that had no stored value, and stay as they are.
    """

    state: Any
    read: list[TensorRecord]
    kept: tuple[str, ...]


def fill_state(
    into: Any,
    copies: StoredCopies,
    skeleton: Any,
    records: Mapping[str, TensorRecord],
    version: str,
    progress: Progress,
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    strict: bool = True,
) -> Filled:
    """Fill the tensors of `into` in place.

    Args:
        into: state tree; see the argument `into` of `restore.restore`.
        copies: places to read from.
        skeleton: skeleton of the stored state.
        records: stored tensors by name.
        version: name of the version, for messages.
        progress: counts the bytes of each chunk that was read.
        only: patterns of the parts of `into` to restore, see `name_filter.select_names`; the others stay as they are.
        exclude: patterns of the parts that stay as they are.
        strict: whether every selected tensor must be stored, with its dtype and shape. If False, the others stay.

    Raises:
        ConfigError: `strict` is set, and the version lacks a tensor of `into`, or has it with another dtype or shape
            (the message lists these in a table); or a tensor of `into` has no memory, or cannot be filled; or `into`
            has an object with a `state_dict`; or a pattern matches nothing. Nothing was changed.
        CorruptDataError, NotFoundError, UnavailableError: see `load_tensors`. Tensors may be filled in part.
    """
    plan = _Visits(records, _selection(into, only, exclude))
    _assemble(into, skeleton, "", plan.used, plan)
    never_made = tuple(_never_made(into, skeleton, ""))
    missing = {path: spec for path, spec in plan.missing.items() if not path.startswith(never_made)}
    if (missing or plan.mismatched) and strict:
        fitting = tuple(target.path for target in plan.targets)
        report = LoadReport(fitting, missing, {}, tuple(plan.mismatched))
        raise ConfigError(
            f"{version} does not fit the state to restore into, nothing was restored: {report}\n"
            "pass the state of the same model and optimizer, with the names that it was saved with; leave parts as "
            "they are with exclude=, or all that does not fit with strict=False"
        )
    kept = (*plan.missing, *(each.name for each in plan.mismatched))
    if kept:
        logger.warning("%s has no values for %s; they stay as they are", version, shorten(kept))
    targets, used = plan.targets, list(plan.used.values())
    _check_tied(targets)
    reads = plan_reads((target.record, target.box, target.part) for target in targets if target.box is not None)
    needed = [*(replace(read.record, chunks=(read.chunk,)) for read in reads), *used]
    progress.begin(sum([record.chunk_bytes(chunk) for record in needed for chunk in record.chunks]))
    with copies.open_source(needed) as source:
        read_chunks(source, reads, progress)
        tensors = load_tensors(source, used, progress=progress)
    plan.is_done = True
    return Filled(_assemble(into, skeleton, "", tensors, plan), needed, kept)


class _Visits:
    """The visits of `_assemble`: first to plan, then to leave the tensors of the tree, which are filled by then.

    Attributes:
        targets: tensors to fill.
        missing: tensors of the tree that the version lacks.
        mismatched: tensors of the tree that are stored with another dtype or shape.
        used: records of the other tensors that the restored tree will have.
        is_done: whether the tensors are filled.
    """

    def __init__(self, records: Mapping[str, TensorRecord], is_selected: Callable[[str], bool]) -> None:
        self.targets: list[_Target] = []
        self.missing: dict[str, TensorSpec] = {}
        self.mismatched: list[Mismatch] = []
        self.used = UsedRecords(records)
        self.is_selected = is_selected
        self.is_done = False
        self._records = records

    def visit(self, path: str, target: torch.Tensor, stored: Any) -> None:
        """Plan to fill `target` with the tensor of the skeleton `stored`."""
        if self.is_done or not self.is_selected(path):
            return
        expected = TensorSpec(dtype_name(target), tuple(target.shape))
        record = None
        if stored is _ABSENT:
            # The stored tree may be nested in another way, as a flattened optimizer state is; then the name is equal.
            record = self._records.get(path)
        elif isinstance(stored, dict) and "$tensor" in stored:
            record = self._records.get(stored["$tensor"])
        if record is None:
            self.missing[path] = expected
            return
        found = TensorSpec(record.dtype, record.shape)
        if found != expected:
            self.mismatched.append(Mismatch(path, expected, found))
            return
        if target.is_meta:
            raise ConfigError(f"{path} has no memory yet; call to_empty(device=...) of its module before the restore")
        self.targets.append(_Target(path, *local_part(path, target), record))


def _selection(into: Any, only: Collection[str], exclude: Collection[str]) -> Callable[[str], bool]:
    """Return whether the part of `into` at a path is restored. Raises ConfigError: a pattern matches no tensor."""
    if not (only or exclude):
        return lambda _path: True
    select_names(list(flatten(into)[1]), only, exclude)  # raises
    return lambda path: is_selected(path, only, exclude)


def _never_made(into: Any, skeleton: Any, path: str) -> Iterator[str]:
    """Yield paths, with a dot: states of parameters in `into` of which the version has none.

    Optimizers make the state of a parameter at its first gradient: an unused head has none. `get_state_dict` makes
    the state of all parameters before a restore.
    """
    if isinstance(into, list | tuple):
        into = dict(enumerate(into))
    if not isinstance(into, Mapping):
        return
    children = _children(skeleton)
    if _has_groups(into) and _has_groups(children):
        made = {key: state for key, state in _children(children.get("state")).items() if _children(state)}
        nested = into.get("state")
        names = _parameters(into, nested if isinstance(nested, Mapping) else {})
        yield from (f"{path}state.{name}." for name in names - _parameters(children, made))
    for key, child in into.items():
        yield from _never_made(child, children.get(key), f"{path}{key}.")


def _has_groups(optimizer: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state of an optimizer, nested or flattened as `get_state_dict` does."""
    return any(isinstance(key, str) and key.partition(".")[0] == "param_groups" for key in optimizer)


def _parameters(optimizer: Mapping[Any, Any], nested: Mapping[Any, Any]) -> set[str]:
    """Return the names of the parameters that have a state; `nested` has those of a state that is not flattened."""
    flat = (key.removeprefix("state.") for key in optimizer if isinstance(key, str) and key.startswith("state."))
    return {*map(str, nested), *(key.rpartition(".")[0] for key in flat)}


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


def _assemble(into: Any, skeleton: Any, path: str, tensors: Mapping[str, Any], plan: _Visits) -> Any:
    """Return `into` with stored values: `plan` visits its tensors, `unflatten` returns the other values."""
    import torch

    if isinstance(into, torch.Tensor):
        inner = inner_tensors(into)
        if inner is None:
            plan.visit(path, into, skeleton)
            return into
        _check_same_class(path, into, skeleton)
        stored = _children(_children(skeleton).get("inner"))
        for name, tensor in inner.items():
            _assemble(tensor, stored.get(name, _ABSENT), f"{path}.inner.{name}", tensors, plan)
        return into
    if callable(getattr(into, "state_dict", None)) and plan.is_selected(path):
        # The stored values would replace the object in the returned tree, and the object itself would stay as it is.
        raise ConfigError(
            f"{path or 'into='} is a {type(into).__name__}, which a restore does not fill; nothing was restored. "
            "Pass its state_dict(), and give the restored part of the state to its load_state_dict(); `load_into` "
            "fills modules"
        )
    children = _children(skeleton)
    # At the root, only the keys of `into` are restored; of a list, only the elements whose numbers a dict has.
    is_chosen = (
        isinstance(into, Mapping) and isinstance(untyped(skeleton), list) and not into.keys() - children.keys()
    )
    if path and not _has_tensors(into) and not (is_chosen and into):
        return unflatten(skeleton, tensors) if skeleton is not _ABSENT and plan.is_selected(path) else into

    def assemble_child(key: Any, child: Any) -> Any:
        return _assemble(child, children.get(key, _ABSENT), f"{path}.{key}" if path else str(key), tensors, plan)

    if isinstance(into, Mapping):
        restored_dict = {key: assemble_child(key, child) for key, child in into.items()}
        # Settings beside tensors, such as a step count in the state of a parameter, need not be in `into`.
        more = {
            key: child
            for key, child in children.items()
            if path and key not in into and _is_plain(child) and plan.is_selected(f"{path}.{key}")
        }
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

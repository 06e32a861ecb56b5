"""What is different between two model versions: data, code, configuration, metrics, and every tensor.

Tensors that their tables show to be equal are never read. Of the others both are read chunk by chunk, so that memory
is bounded by the chunks, however large the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from datasvc.models.tensors.codec import Decoders
from datasvc.models.tensors.read import ChunkSource, load_chunk, load_window
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, read_table
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects.objects import parse_digest

if TYPE_CHECKING:
    import torch

_TENSORS_AT_ONCE: Final = 2
_BLOCK_ELEMENTS: Final = 1 << 20
_PARTS: Final = ("data", "code", "config", "metrics", "environment")


@dataclass(frozen=True)
class ValueChanges:
    """What leads from one tree of values to another, by dotted path.

    Attributes:
        added: values that only the second has.
        removed: values that only the first has.
        changed: first and second value where both have one.
    """

    added: Mapping[str, Any]
    removed: Mapping[str, Any]
    changed: Mapping[str, tuple[Any, Any]]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True)
class TensorChange:
    """How a tensor changed that both versions have with one dtype and shape.

    Attributes:
        name: of the tensor.
        norm: Euclidean norm of second minus first, over the elements where that is finite.
        relative: `norm` divided by the norm of the first; None where that is 0.
        num_changed: elements that differ.
        num_elements: elements that there are.
        num_nonfinite: elements where the difference is no finite number.
    """

    name: str
    norm: float
    relative: float | None
    num_changed: int
    num_elements: int
    num_nonfinite: int


@dataclass(frozen=True)
class TensorsDifference:
    """What leads from the tensors of one version to those of another.

    Attributes:
        added: records that only the second has.
        removed: records that only the first has.
        retyped: records of both where dtype or shape differ.
        changed: names of tensors whose elements differ, sorted.
        num_equal: tensors with the same dtype, shape and elements.
        changes: of each of `changed`; () where nobody asked for norms.
    """

    added: tuple[TensorRecord, ...]
    removed: tuple[TensorRecord, ...]
    retyped: tuple[tuple[TensorRecord, TensorRecord], ...]
    changed: tuple[str, ...]
    num_equal: int
    changes: tuple[TensorChange, ...] = ()


@dataclass(frozen=True)
class ModelDifference:
    """What leads from version `a` to version `b`.

    Attributes:
        a: the first version.
        b: the second.
        steps: of each.
        values: by "data", "code", "config", "metrics" and "environment".
        tensors: of model, optimizer and all else in the state.
    """

    a: Resolved
    b: Resolved
    steps: tuple[int, int]
    values: Mapping[str, ValueChanges]
    tensors: TensorsDifference


def diff(
    repository: Repository,
    a: str,
    b: str,
    *,
    norms: bool = True,
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> ModelDifference:
    """Return what leads from version `a` to version `b`, which may be of different models.

    Args:
        repository: where both lie.
        a: the first version.
        b: the second.
        norms: read the tensors that differ, to say by how much.
        begin: called with the bytes that will be read, before any is.
        report: called with the bytes of each chunk once it was compared, from any thread.

    Raises:
        ConfigError, NotFoundError: see `Repository.resolve`.
        CorruptDataError, UnavailableError: a table or tensor cannot be read.
    """
    versions = [repository.resolve("models", ref) for ref in (a, b)]
    first, second = (repository.entry(version).content for version in versions)
    tables = [read_table(repository.objects, parse_digest(entry["tensors"])) for entry in (first, second)]
    tensors = compare_tables(*tables)
    if norms:
        pairs = _pairs(tables, tensors.changed)
        (begin or _ignore)(sum(ours.nbytes for ours, _ in pairs))
        with ThreadPoolExecutor(_TENSORS_AT_ONCE, thread_name_prefix="datasvc-diff") as pool:
            found = pool.map(lambda pair: measure_change(repository.objects, *pair, report=report or _ignore), pairs)
            tensors = TensorsDifference(**{**vars(tensors), "changes": tuple(found)})
    return ModelDifference(
        versions[0],
        versions[1],
        (int(first["step"]), int(second["step"])),
        {part: compare_values(_part(first, part), _part(second, part)) for part in _PARTS},
        tensors,
    )


def compare_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> ValueChanges:
    """Return what leads from one tree of JSON values to another; lists count as one value."""
    ours, theirs = dict(_leaves(a, "")), dict(_leaves(b, ""))
    return ValueChanges(
        {path: value for path, value in theirs.items() if path not in ours},
        {path: value for path, value in ours.items() if path not in theirs},
        {
            path: (ours[path], value)
            for path, value in theirs.items()
            if path in ours and (ours[path] != value or type(ours[path]) is not type(value))
        },
    )


def compare_tables(a: Sequence[TensorRecord], b: Sequence[TensorRecord]) -> TensorsDifference:
    """Return what leads from one table to another, by what the tables say alone.

    Tensors of which one is cut into other chunks than the other count as changed: their digests do not compare.
    """
    ours, theirs = ({record.name: record for record in table} for table in (a, b))
    both = [(ours[name], theirs[name]) for name in sorted(ours.keys() & theirs.keys())]
    alike = [(x, y) for x, y in both if (x.dtype, x.shape) == (y.dtype, y.shape)]
    changed = tuple(x.name for x, y in alike if x.content != y.content)
    return TensorsDifference(
        added=tuple(record for record in b if record.name not in ours),
        removed=tuple(record for record in a if record.name not in theirs),
        retyped=tuple((x, y) for x, y in both if (x.dtype, x.shape) != (y.dtype, y.shape)),
        changed=changed,
        num_equal=len(alike) - len(changed),
    )


def measure_change(
    source: ChunkSource, a: TensorRecord, b: TensorRecord, *, report: Callable[[int], None]
) -> TensorChange:
    """Return by how much a tensor changed; `a` and `b` have one dtype and shape. Raises as `load_chunk`."""
    change_squared = base_squared = 0.0
    num_changed = num_nonfinite = 0
    for chunk, before, after in _aligned(source, a, b):
        for old, new in _blocks(before, after):
            change = new - old
            finite = change.isfinite()
            num_changed += int(((new != old) & ~(new.isnan() & old.isnan())).sum())
            num_nonfinite += change.numel() - int(finite.sum())
            change_squared += float(change[finite].square().sum())
            base_squared += float(old[old.isfinite()].square().sum())
        report(b.chunk_bytes(chunk))
    norm, base = math.sqrt(change_squared), math.sqrt(base_squared)
    relative = norm / base if base else None
    return TensorChange(a.name, norm, relative, num_changed, math.prod(a.shape), num_nonfinite)


def _aligned(
    source: ChunkSource, a: TensorRecord, b: TensorRecord
) -> Iterator[tuple[Chunk, torch.Tensor, torch.Tensor]]:
    """Yield both tensors chunk by chunk, as `b` is cut."""
    ours = {chunk.box: chunk for chunk in a.chunks}
    decoders = Decoders()
    for chunk in b.chunks:
        same = ours.get(chunk.box)
        if same is None:
            before = load_window(source, a, chunk.start, chunk.shape)
        else:
            before = load_chunk(source, a.dtype, same, name=a.name, decoders=decoders)
        is_equal = same is not None and same.digest == chunk.digest
        yield (
            chunk,
            before,
            before if is_equal else load_chunk(source, b.dtype, chunk, name=b.name, decoders=decoders),
        )


def _blocks(before: torch.Tensor, after: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both in float64, some elements at a time: whole chunks would take many times their bytes."""
    import torch

    old, new = ((torch.view_as_real(each) if each.is_complex() else each).reshape(-1) for each in (before, after))
    for start in range(0, len(old), _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        yield old[block].to(torch.float64), new[block].to(torch.float64)


def _pairs(tables: Sequence[Sequence[TensorRecord]], names: Sequence[str]) -> list[tuple[TensorRecord, TensorRecord]]:
    ours, theirs = ({record.name: record for record in table} for table in tables)
    return [(ours[name], theirs[name]) for name in names]


def _part(entry: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    if part == "data":
        return {_use_name(use): use["state"] for use in entry["data"]}
    return entry.get(part) or {}


def _use_name(use: Mapping[str, Any]) -> str:
    purpose = use.get("purpose", "training")
    return f"{use['dataset']}/{use['split']}" + ("" if purpose == "training" else f" ({purpose})")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _ignore(_size_bytes: int) -> None:
    """Report to nobody."""

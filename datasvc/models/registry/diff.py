"""Compare two model versions: data, code, configuration, metrics, environment, execution, modules, and every tensor.

Tensors that are equal according to the tensor tables are not read. The others are read chunk by chunk, so memory does
not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from datasvc.models.tensors.codec import Decoders
from datasvc.models.tensors.read import ChunkSource, load_chunk, load_window
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, read_table
from datasvc.models.versions.entry_fields import check_fields, tree_leaves
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.shown import Shown
from datasvc.threads import run_in_threads

if TYPE_CHECKING:
    import torch

_TENSORS_AT_ONCE: Final = 2  # read and measured in parallel
_BLOCK_ELEMENTS: Final = 1 << 20  # of a chunk, converted to float64 together
_PARTS: Final = ("data", "code", "config", "metrics", "environment", "execution", "modules", "ops")


@dataclass(frozen=True)
class ValueChanges:
    """Differences between two trees of JSON values, by dotted path.

    Attributes:
        added: values that only the second tree has.
        removed: values that only the first tree has.
        changed: pairs (first, second) of values that both trees have and that differ.
    """

    added: Mapping[str, Any]
    removed: Mapping[str, Any]
    changed: Mapping[str, tuple[Any, Any]]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True)
class TensorChange:
    """Change of a tensor that both versions have with the same dtype and shape.

    Attributes:
        name: name in the state.
        norm: Euclidean norm of (second - first), over the elements whose difference is finite.
        relative: `norm` divided by the norm of the first tensor; None if that is 0.
        num_changed: number of elements that differ, of `num_elements`.
        num_nonfinite: number of elements whose difference is infinite or NaN.
    """

    name: str
    norm: float
    relative: float | None
    num_changed: int
    num_elements: int
    num_nonfinite: int


@dataclass(frozen=True)
class TensorsDifference:
    """Differences between the tensors of two versions.

    Attributes:
        added: records of tensors that only the second version has.
        removed: records of tensors that only the first version has.
        retyped: pairs of records (first, second) of tensors whose dtype or shape differs.
        changed: names of tensors whose elements differ, sorted.
        num_equal: number of tensors with the same dtype, shape and elements.
        changes: one entry for each of `changed`; () if norms were not requested.
    """

    added: tuple[TensorRecord, ...]
    removed: tuple[TensorRecord, ...]
    retyped: tuple[tuple[TensorRecord, TensorRecord], ...]
    changed: tuple[str, ...]
    num_equal: int
    changes: tuple[TensorChange, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        return {
            "added": list(map(_spec, self.added)),
            "removed": list(map(_spec, self.removed)),
            "retyped": [{"name": old.name, "from": _spec(old), "to": _spec(new)} for old, new in self.retyped],
            "changed": list(self.changed),
            "changes": [asdict(change) for change in self.changes],
            "equal": self.num_equal,
        }


@dataclass(frozen=True)
class ModelDifference(Shown):
    """Differences between the model versions `a` and `b`.

    Attributes:
        steps: optimizer steps of `a` and of `b`.
        values: changes under "data", "code", "config", "metrics", "environment", "execution", "modules" and "ops".
        tensors: changes of all tensors of the state, those of the optimizer included.
    """

    a: Resolved
    b: Resolved
    steps: tuple[int, int]
    values: Mapping[str, ValueChanges]
    tensors: TensorsDifference

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values, as `datasvc models diff --json` prints them."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "steps": list(self.steps),
            **{part: asdict(changes) for part, changes in self.values.items()},
            "tensors": self.tensors.to_dict(),
        }


def diff(
    repository: Repository, a: str, b: str, *, norms: bool = True, progress: Progress = NO_PROGRESS
) -> ModelDifference:
    """Compare two versions, of the same model or of two models.

    Args:
        repository: repository of both versions.
        a: reference of the first version.
        b: reference of the second version.
        norms: whether to read the tensors that differ and measure their change.
        progress: counts the bytes of each chunk that was compared.

    Raises:
        ConfigError: a reference is not valid.
        NotFoundError: a version does not exist.
        CorruptDataError: an entry, table or tensor is damaged.
        UnavailableError: a table or tensor cannot be read.
    """
    versions = [repository.resolve("models", ref) for ref in (a, b)]
    first, second = (repository.entry(version).content for version in versions)
    for version, entry in zip(versions, (first, second), strict=True):
        check_fields(entry, version)
    tables = [read_table(repository.objects, parse_digest(entry["tensors"])) for entry in (first, second)]
    tensors = compare_tables(*tables)
    if norms:
        records_a, records_b = ({record.name: record for record in table} for table in tables)
        pairs = [(records_a[name], records_b[name]) for name in tensors.changed]
        progress.begin(sum(record.nbytes for record, _ in pairs))
        measure = partial(measure_change, repository.objects, progress=progress)
        tensors = _with_changes(tensors, pairs, run_in_threads(measure, pairs, _TENSORS_AT_ONCE))
    return ModelDifference(
        versions[0],
        versions[1],
        (int(first["step"]), int(second["step"])),
        {part: compare_values(_part(first, part), _part(second, part)) for part in _PARTS},
        tensors,
    )


def _with_changes(
    tensors: TensorsDifference, pairs: Sequence[tuple[TensorRecord, TensorRecord]], changes: Sequence[TensorChange]
) -> TensorsDifference:
    """Return `tensors` with the measured changes of `pairs`, the tensors that may differ."""
    # Runs with other layouts store the same tensor in other chunks: only its elements show whether it has changed.
    changed = tuple(
        change
        for change, (a, b) in zip(changes, pairs, strict=True)
        if change.num_changed or [chunk.box for chunk in a.chunks] == [chunk.box for chunk in b.chunks]
    )
    names = tuple(change.name for change in changed)
    num_equal = tensors.num_equal + len(changes) - len(changed)
    return replace(tensors, changed=names, num_equal=num_equal, changes=changed)


def compare_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> ValueChanges:
    """Compare two trees of JSON values by dotted path; a list is compared as one value."""
    leaves_a, leaves_b = dict(tree_leaves(a, "")), dict(tree_leaves(b, ""))
    return ValueChanges(
        {path: value for path, value in leaves_b.items() if path not in leaves_a},
        {path: value for path, value in leaves_a.items() if path not in leaves_b},
        {
            path: (leaves_a[path], value)
            for path, value in leaves_b.items()
            # Compare types too: in Python 1 == 1.0 == True, but in a configuration these are different values.
            if path in leaves_a and (leaves_a[path] != value or type(leaves_a[path]) is not type(value))
        },
    )


def compare_tables(a: Sequence[TensorRecord], b: Sequence[TensorRecord]) -> TensorsDifference:
    """Compare two tensor tables without reading any tensor.

    A tensor whose chunks have other boundaries in `b` than in `a` counts as changed, because digests of different
    slices cannot be compared; `diff` compares its elements.
    """
    records_a, records_b = ({record.name: record for record in table} for table in (a, b))
    common = [(records_a[name], records_b[name]) for name in sorted(records_a.keys() & records_b.keys())]
    same_spec = [(x, y) for x, y in common if (x.dtype, x.shape) == (y.dtype, y.shape)]
    changed = tuple(x.name for x, y in same_spec if x.content != y.content)
    return TensorsDifference(
        added=tuple(record for record in b if record.name not in records_a),
        removed=tuple(record for record in a if record.name not in records_b),
        retyped=tuple((x, y) for x, y in common if (x.dtype, x.shape) != (y.dtype, y.shape)),
        changed=changed,
        num_equal=len(same_spec) - len(changed),
    )


def measure_change(source: ChunkSource, a: TensorRecord, b: TensorRecord, *, progress: Progress) -> TensorChange:
    """Measure the change from `a` to `b`, which have the same dtype and shape; for errors, see `load_chunk`."""
    change_squared = old_squared = 0.0
    num_changed = num_nonfinite = 0
    for chunk, before, after in _aligned(source, a, b):
        for old, new in _blocks(before, after):
            change = new - old
            # One infinite or NaN element would make the norm useless, so such elements are counted separately.
            finite = change.isfinite()
            # In torch, NaN != NaN; but NaN in both tensors is not a change.
            num_changed += int(((new != old) & ~(new.isnan() & old.isnan())).sum())
            num_nonfinite += change.numel() - int(finite.sum())
            change_squared += float(change[finite].square().sum())
            old_squared += float(old[old.isfinite()].square().sum())
        progress.advance(b.chunk_bytes(chunk))
    norm, old_norm = math.sqrt(change_squared), math.sqrt(old_squared)
    relative = norm / old_norm if old_norm else None
    return TensorChange(a.name, norm, relative, num_changed, math.prod(a.shape), num_nonfinite)


def _aligned(
    source: ChunkSource, a: TensorRecord, b: TensorRecord
) -> Iterator[tuple[Chunk, torch.Tensor, torch.Tensor]]:
    """Yield each chunk of `b`, with the values of `a` and of `b` in its slice."""
    chunks_of_a = {chunk.box: chunk for chunk in a.chunks}
    decoders = Decoders()
    for chunk in b.chunks:
        old_chunk = chunks_of_a.get(chunk.box)
        # If `a` has no chunk with these boundaries, read the same slice from the chunks of `a` that overlap it.
        if old_chunk is None:
            before = load_window(source, a, chunk.start, chunk.shape)
        else:
            before = load_chunk(source, a.dtype, old_chunk, name=a.name, decoders=decoders)
        # Chunks with equal digests are equal, so the second one is not read.
        if old_chunk is not None and old_chunk.digest == chunk.digest:
            yield chunk, before, before
        else:
            yield chunk, before, load_chunk(source, b.dtype, chunk, name=b.name, decoders=decoders)


def _blocks(before: torch.Tensor, after: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both tensors as float64 in blocks, because a whole chunk would take up to eight times its bytes."""
    import torch

    old, new = (
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1) for tensor in (before, after)
    )
    for start in range(0, len(old), _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        yield old[block].to(torch.float64), new[block].to(torch.float64)


def _spec(record: TensorRecord) -> dict[str, Any]:
    return {"name": record.name, "dtype": record.dtype, "shape": list(record.shape)}


def _part(entry: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    if part == "data":
        return {_use_name(use): use["state"] for use in entry["data"]}
    return entry.get(part) or {}


def _use_name(use: Mapping[str, Any]) -> str:
    purpose = use.get("purpose", "training")
    return f"{use['dataset']}/{use['split']}" + ("" if purpose == "training" else f" ({purpose})")

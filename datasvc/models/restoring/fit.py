"""Whether the tensors of a checkpoint fit a model: by name, dtype and shape, with a table of what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from datasvc.models.tensors.tensor_table import ITEM_BYTES

_SHOWN_ROWS: Final = 40
_HEAD = ("tensor", "model wants", "checkpoint has")


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values: torch's name of its dtype, and its sizes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Mismatch:
    """A tensor that both sides have, and not alike.

    Attributes:
        name: the model's.
        wanted: what the model has.
        found: what the checkpoint has: of another dtype or shape, or else with other values than `tied_to`.
        tied_to: the model's first name of the same memory, where the checkpoint has two tensors for it.
    """

    name: str
    wanted: TensorSpec
    found: TensorSpec
    tied_to: str | None = None

    @property
    def what(self) -> str:
        """What the checkpoint has, in words."""
        return f"{self.found}" if self.tied_to is None else f"{self.found}, other values than {self.tied_to}"


@dataclass(frozen=True)
class LoadReport:
    """What loading did, or would do. Names are the model's own, in its order.

    Attributes:
        loaded: tensors that were filled.
        missing: of the model, what the checkpoint lacks.
        unexpected: of the checkpoint, what the model has no place for.
        mismatched: what both have, and not alike.
    """

    loaded: tuple[str, ...]
    missing: Mapping[str, TensorSpec]
    unexpected: Mapping[str, TensorSpec]
    mismatched: tuple[Mismatch, ...]

    @property
    def is_exact(self) -> bool:
        """Whether both sides have the same tensors."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        counts = (
            f"{len(self.loaded)} tensors fit, {len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.mismatched)} of another dtype or shape"
        )
        return counts if self.is_exact else f"{counts}\n{self.table()}"

    def table(self) -> str:
        """Return the differences as lines of three columns, the first 40."""
        rows = [
            *((each.name, str(each.wanted), each.what) for each in self.mismatched),
            *((name, str(spec), "-") for name, spec in self.missing.items()),
            *((name, "-", str(spec)) for name, spec in self.unexpected.items()),
        ]
        shown = [_HEAD, *(tuple(map(printable, row)) for row in rows[:_SHOWN_ROWS])]
        widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
        lines = [f"  {name:{widths[0]}}  {wanted:{widths[1]}}  {found}" for name, wanted, found in shown]
        if len(rows) > _SHOWN_ROWS:
            lines.append(f"  and {len(rows) - _SHOWN_ROWS} more")
        return "\n".join(lines)


def plan_load(
    wanted: Mapping[str, TensorSpec],
    found: Mapping[str, TensorSpec],
    tied: Mapping[str, str] | None = None,
    *,
    cast: bool = False,
    are_equal: Callable[[str, str], bool] = lambda _one, _other: True,
) -> LoadReport:
    """Compare tensors by name, dtype and shape.

    Args:
        wanted: the model's.
        found: the checkpoint's, by the model's names.
        tied: of the model's names that share memory with an earlier one, which; one of them is enough.
        cast: dtypes may differ.
        are_equal: whether two of the checkpoint's tensors are, by the model's names: asked of tied ones.
    """
    first = dict(tied or {})
    mismatched = tuple(
        Mismatch(name, spec, found[name])
        for name, spec in wanted.items()
        if name in found and not _fits(spec, found[name], cast=cast)
    )
    bad = {each.name for each in mismatched}
    mismatched += tuple(_untied(wanted, found, first, bad, are_equal))
    bad = {each.name for each in mismatched}
    given = {first.get(name, name) for name in wanted if name in found and name not in bad}
    loaded = tuple(name for name in wanted if name not in bad and first.get(name, name) in given)
    filled = set(loaded)
    return LoadReport(
        loaded,
        {name: spec for name, spec in wanted.items() if name not in found and name not in filled},
        {name: spec for name, spec in found.items() if name not in wanted},
        mismatched,
    )


def _untied(
    wanted: Mapping[str, TensorSpec],
    found: Mapping[str, TensorSpec],
    first: Mapping[str, str],
    bad: Container[str],
    are_equal: Callable[[str, str], bool],
) -> Iterator[Mismatch]:
    """Yield the second names of tensors for which the checkpoint has another tensor than for the first."""
    given: dict[str, str] = {}
    for name in wanted:
        if name in found and name not in bad:
            one = given.setdefault(first.get(name, name), name)
            if one != name and not are_equal(one, name):
                yield Mismatch(name, wanted[name], found[name], one)


def printable(text: str) -> str:
    """Return text of a file for a terminal, which control characters could command."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _fits(wanted: TensorSpec, found: TensorSpec, *, cast: bool) -> bool:
    return wanted.shape == found.shape and (cast or wanted.dtype == found.dtype)

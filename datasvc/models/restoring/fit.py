"""Compares the tensors of a checkpoint and a model by name, dtype and shape, to choose those that `load_into` loads.

Several names may refer to one tensor of a model, as in weight tying. These are called tied names. The functions here
are pure: they take and return specifications, not tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.printable import count_text

_SHOWN_ROWS: Final = 40
_HEAD = ("tensor", "model expects", "checkpoint has")


@dataclass(frozen=True)
class TensorSpec:
    """Dtype, by torch's name, and shape of a tensor."""

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
    """A tensor that both the model and the checkpoint have, but that cannot be loaded.

    Attributes:
        name: name in the model.
        expected: dtype and shape in the model.
        found: dtype and shape in the checkpoint.
        tied_to: the other of two tied names, if the checkpoint has different values for them; None otherwise.
    """

    name: str
    expected: TensorSpec
    found: TensorSpec
    tied_to: str | None = None

    @property
    def what(self) -> str:
        """Description of the checkpoint's tensor, for the table."""
        return f"{self.found}" if self.tied_to is None else f"{self.found}, other values than {self.tied_to}"


@dataclass(frozen=True)
class LoadReport:
    """Result of loading a checkpoint into a model, or of a comparison. Names are those of the model, in its order.

    Attributes:
        loaded: tensors of the model that are filled.
        missing: tensors of the model that the checkpoint lacks.
        unexpected: tensors of the checkpoint that the model does not have.
        mismatched: tensors that both have, but that differ in dtype or shape, or in the values of tied names.
    """

    loaded: tuple[str, ...]
    missing: Mapping[str, TensorSpec]
    unexpected: Mapping[str, TensorSpec]
    mismatched: tuple[Mismatch, ...]

    @property
    def is_exact(self) -> bool:
        """Whether model and checkpoint have the same tensors."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        counts = (
            f"{count_text(len(self.loaded), 'tensor fits', 'tensors fit')}, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, "
            f"{len(self.mismatched)} of another dtype or shape"
        )
        return counts if self.is_exact else f"{counts}\n{self.table()}"

    def table(self) -> str:
        """Return the differences as a table of three columns, at most 40 rows."""
        rows = [
            *((mismatch.name, str(mismatch.expected), mismatch.what) for mismatch in self.mismatched),
            *((name, str(spec), "-") for name, spec in self.missing.items()),
            *((name, "-", str(spec)) for name, spec in self.unexpected.items()),
        ]
        shown = [_HEAD, *(tuple(map(_printable, row)) for row in rows[:_SHOWN_ROWS])]
        widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
        lines = [f"  {name:{widths[0]}}  {expected:{widths[1]}}  {found}" for name, expected, found in shown]
        if len(rows) > _SHOWN_ROWS:
            lines.append(f"  and {len(rows) - _SHOWN_ROWS} more")
        return "\n".join(lines)


def plan_load(
    expected: Mapping[str, TensorSpec],
    found: Mapping[str, TensorSpec],
    tied: Mapping[str, str] | None = None,
    *,
    cast: bool = False,
    are_equal: Callable[[str, str], bool] = lambda _one, _other: True,
) -> LoadReport:
    """Compare the tensors of a model and a checkpoint by name, dtype and shape.

    Args:
        expected: tensors of the model.
        found: tensors of the checkpoint, by names of the model.
        tied: maps the second and each further name of a tensor of the model to its first name. The checkpoint needs
            only one name of each tensor.
        cast: whether dtypes may differ.
        are_equal: returns whether two tensors of the checkpoint have equal values; called for tied names.
    """
    first_names = dict(tied or {})
    mismatched = tuple(
        Mismatch(name, spec, found[name])
        for name, spec in expected.items()
        if name in found and (spec.shape != found[name].shape or not (cast or spec.dtype == found[name].dtype))
    )
    # Tied names refer to one tensor of the model, which cannot hold two different values.
    misfits = {mismatch.name for mismatch in mismatched}
    mismatched += tuple(_find_untied(expected, found, first_names, misfits, are_equal))
    misfits = {mismatch.name for mismatch in mismatched}
    # First names of the tensors that are filled. Tied names share memory, so one name in the checkpoint loads all.
    filled = {first_names.get(name, name) for name in expected if name in found and name not in misfits}
    loaded = tuple(name for name in expected if name not in misfits and first_names.get(name, name) in filled)
    loaded_names = set(loaded)
    return LoadReport(
        loaded,
        {name: spec for name, spec in expected.items() if name not in found and name not in loaded_names},
        {name: spec for name, spec in found.items() if name not in expected},
        mismatched,
    )


def _find_untied(
    expected: Mapping[str, TensorSpec],
    found: Mapping[str, TensorSpec],
    first_names: Mapping[str, str],
    misfits: Container[str],
    are_equal: Callable[[str, str], bool],
) -> Iterator[Mismatch]:
    """Yield each tied name whose value in the checkpoint differs from that of another name of the same tensor.

    Names in `misfits` are left out, because they cannot be loaded anyway.
    """
    # By first name in the model: the first name of this tensor that the checkpoint has.
    first_found: dict[str, str] = {}
    for name in expected:
        if name in found and name not in misfits:
            other = first_found.setdefault(first_names.get(name, name), name)
            if other != name and not are_equal(other, name):
                yield Mismatch(name, expected[name], found[name], other)


def _printable(text: str) -> str:
    """Escape text from a checkpoint, because its control characters could change the terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()

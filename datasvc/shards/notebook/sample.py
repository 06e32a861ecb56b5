"""A sample as a dict that a notebook shows with its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from datasvc.drawing import Markup, facts_table, figure, markup, standalone
from datasvc.errors import BadSampleError
from datasvc.printable import count_text
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, is_blob, is_image
from datasvc.sizes import format_size

_SIDE: Final = 192  # of the picture of one sample, in pixels
_GRID_SIDE: Final = 96
_MAX_VALUE: Final = 300  # characters


class Sample(dict[str, Any]):
    """The values of a sample by column; equal to the dict of the same values.

    Attributes:
        images: names of its columns that hold encoded images.
        class_name: class name of its label; None if it has none.
    """

    __slots__ = ("class_name", "images")

    def __init__(
        self, values: Mapping[str, Any] | None = None, images: tuple[str, ...] = (), class_name: str | None = None
    ) -> None:
        super().__init__(values or {})
        self.images = images
        self.class_name = class_name

    @classmethod
    def of(cls, values: Mapping[str, Any], images: tuple[str, ...], classes: Sequence[str]) -> Sample:
        """Return a sample of a split with these columns of images and class names."""
        label = values.get(LABEL)
        name = classes[label] if isinstance(label, int) and 0 <= label < len(classes) else None
        return cls(values, images, name)

    def __repr__(self) -> str:
        # Without encoded images: a slice of a split is a list of samples, whose representation has all of them.
        shown = (
            f"{name!r}: " + (f"<{count_text(len(value), 'byte')}>" if isinstance(value, bytes) else repr(value))
            for name, value in self.items()
        )
        return "{" + ", ".join(shown) + "}"

    def _repr_html_(self) -> str:
        pictures = [_picture(self, column, _SIDE, [column]) for column in self.images if self.get(column) is not None]
        facts = {str(name): _shown(value) for name, value in self.items() if name not in self.images}
        if self.class_name not in {None, str(self.get(LABEL))}:
            facts[LABEL] = f"{self.get(LABEL)} ({self.class_name})"
        return standalone(markup(pictures), facts_table(facts))


def image_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that hold encoded images."""
    return tuple(field.name for field in schema if is_image(field) or (field.name == IMAGE and is_blob(field.type)))


def sample_grid(samples: Iterable[Sample]) -> Markup:
    """Return the first picture of each sample, with class name and key below."""
    return markup(
        _picture(sample, sample.images[0], _GRID_SIDE, [sample.class_name or "", str(sample.get(KEY, ""))])
        for sample in samples
        if sample.images
    )


def _picture(sample: Sample, column: str, side: int, captions: Sequence[str]) -> Markup:
    # Pillow is imported for pictures only: `datasvc show` reads no sample.
    from datasvc.shards.images.thumbnail import png_thumbnail

    title = f"{column} of {sample.get(KEY, 'a sample')}"
    try:
        return figure(png_thumbnail(bytes(sample[column]), side), captions, title=title)
    except (BadSampleError, TypeError, ValueError) as error:
        return figure(None, [*captions, f"does not decode: {error}"], title=title, is_problem=True)


def _shown(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return format_size(len(value))
    text = str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"

"""Chooses the columns for the fields of WebDataset samples, by the last extension of a field.

- Images (jpg, jpeg, png, webp, ...) are image columns. The column `image` is the field whose name is only an image
  extension. Several such fields are one column if no sample has two of them (0.jpg and 1.png). Without such a field,
  a single image field of another name becomes `image`. Other image fields ("seg.png") keep their names.
- "cls" is an integer; the field with exactly this name is the column `label`.
- "txt", "text" and "json" are text. JSON is not parsed: its structure may differ from sample to sample, while a
  column has one type.
- All others are bytes.

The field "key.txt" is the key. A field called `key`, `image`, `width`, `height` or `label` gets the prefix "source_"
if the data set has another column of this name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import pyarrow as pa

from datasvc.errors import BadSampleError
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, image_field
from datasvc.shards.images.header import EXTENSIONS

KEY_FIELD: Final = "key.txt"
_IMAGES: Final = frozenset(extension[1:] for extension in EXTENSIONS)  # without the dot
_INTEGER, _TEXTS = "cls", frozenset({"txt", "text", "json"})
_DIGITS: Final = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")  # an int64 has at most 19 digits
_SOURCE_PREFIX: Final = "source_"
_NULLABLE_FROM_ONE_IN: Final = 10  # `image` is nullable if at least one in this many first samples lacks it


def choose_columns(samples: Sequence[Collection[str]]) -> tuple[dict[str, str], pa.Schema]:
    """Return the column of each field, and the schema.

    A field may be absent in later samples, except an image field that all of `samples` have. The column `image` is
    nullable only if at least one sample in ten lacks it: otherwise a sample without an image is a bad sample.

    Args:
        samples: field names of each of the first samples.
    """
    counts = Counter(name for names in samples for name in names if name != KEY_FIELD)  # number of samples by field
    images = _main_images(samples, [name for name in counts if _last(name) in _IMAGES])
    # A field must not get the name of a column that loaders read as something else.
    taken = {KEY}
    if images:
        taken |= {IMAGE, WIDTH, HEIGHT}
    if _INTEGER in counts:
        taken.add(LABEL)
    columns = {name: f"{_SOURCE_PREFIX}{name}" if name in taken else name for name in counts}
    columns |= dict.fromkeys(images, IMAGE)
    if _INTEGER in counts:
        columns[_INTEGER] = LABEL
    fields = {KEY: pa.field(KEY, pa.string(), nullable=False)}
    for name, column in columns.items():
        if column == IMAGE:
            # No sample has two of the fields `images`, so each field counts other samples.
            num_without_image = len(samples) - sum(counts[image] for image in images)
            nullable = num_without_image * _NULLABLE_FROM_ONE_IN >= len(samples)
        else:
            nullable = counts[name] < len(samples)
        fields[column] = _field(name, column, nullable=nullable)
    return columns, pa.schema(list(fields.values()))


def field_value(name: str, content: bytes) -> bytes | str | int:
    """Return the content of the field `name` as a value of its column; raise BadSampleError if it is not valid."""
    last = _last(name)
    if last == _INTEGER:
        digits = _DIGITS.fullmatch(content)
        if digits is None:
            raise BadSampleError(f"its field {name!r} is not an integer: {content[:40]!r}")
        return int(digits[1])
    if last in _TEXTS:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise BadSampleError(f"its field {name!r} is not UTF-8: {error}") from error
    return content


def _main_images(samples: Sequence[Collection[str]], images: Sequence[str]) -> Sequence[str]:
    """Return the fields that become the column `image`; they may include fields that no sample has yet."""
    extension_only = [name for name in images if "." not in name]
    if not extension_only:
        return images if len(images) == 1 else []
    # Two of these fields in one sample cannot both be the column `image`.
    if len(extension_only) > 1 and any(sum(name in extension_only for name in names) > 1 for names in samples):
        return []
    return sorted(_IMAGES)  # all extensions, because later samples may have another one


def _field(name: str, column: str, *, nullable: bool) -> pa.Field:
    """Return the `column` for the field `name`. `nullable` is used for images only: all others are nullable."""
    last = _last(name)
    if last in _IMAGES:
        return image_field(column, nullable=nullable)
    if last == _INTEGER:
        return pa.field(column, pa.int32() if column == LABEL else pa.int64())
    return pa.field(column, pa.string() if last in _TEXTS else pa.large_binary())


def _last(name: str) -> str:
    """Return the last extension in the name of a field: "png" for "seg.png"."""
    return name.rpartition(".")[2]

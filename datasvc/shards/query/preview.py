"""Previews of a split's first samples, with values, blob sizes and images; and thumbnails of these images.

`datasvc head` and the contact sheet show the previews.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
from PIL import Image, ImageOps

from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, is_blob, is_image
from datasvc.shards.images.header import open_image
from datasvc.shards.versions.dataset import Split


@dataclass(frozen=True)
class Preview:
    """One sample for display.

    Attributes:
        split: name of its split.
        key: its key.
        class_name: class name of its label; None if the label has none.
        values: values by column, without `key` and blobs; a null blob is shown here as None.
        blob_bytes: size of each blob by column.
        images: encoded images by column, in column order.
    """

    split: str
    key: str
    class_name: str | None
    values: Mapping[str, Any]
    blob_bytes: Mapping[str, int]
    images: Mapping[str, bytes]


def preview_samples(split: Split, num_samples: int) -> Iterator[Preview]:
    """Yield the first live (not deleted) samples of a split, in the order of its shard table.

    Raises:
        ConfigError: `num_samples` is negative.
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    if num_samples < 0:
        raise ConfigError(f"cannot show {count_text(num_samples, 'sample')}; expected 0 or more")
    schema = split.table.sample_schema
    return (_preview(split, schema, sample) for sample in islice(split, num_samples))


def thumbnail(encoded: bytes, max_side: int) -> Image.Image:
    """Return an image as RGB, upright, with neither side longer than `max_side` pixels.

    Raises:
        BadSampleError: `encoded` is not an image, or does not decode.
    """
    with open_image(encoded) as image:
        image.draft("RGB", (max_side, max_side))  # a JPEG is decoded at a smaller scale, which is faster
        upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((max_side, max_side))
    return upright


def _preview(split: Split, schema: pa.Schema, sample: Mapping[str, Any]) -> Preview:
    blobs = {field.name: sample[field.name] for field in schema if is_blob(field.type)}
    # A null blob has no size, so it is shown among the values.
    present = {name: blob for name, blob in blobs.items() if blob is not None}
    return Preview(
        split.name,
        sample[KEY],
        _class_name(sample.get(LABEL), split.classes),
        {name: value for name, value in sample.items() if name != KEY and name not in present},
        {name: len(blob) for name, blob in present.items()},
        {
            field.name: present[field.name]
            for field in schema
            if field.name in present and (field.name == IMAGE or is_image(field))
        },
    )


def _class_name(label: Any, classes: Sequence[str]) -> str | None:
    return classes[label] if isinstance(label, int) and 0 <= label < len(classes) else None

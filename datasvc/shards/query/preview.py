"""The first samples of a split, as people look at them: values, sizes of blobs, pictures made small."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
from PIL import Image, ImageOps

from datasvc.errors import BadSampleError, ConfigError
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, is_blob, is_image
from datasvc.shards.images.header import FORMATS
from datasvc.shards.versions.dataset import Split


@dataclass(frozen=True)
class Preview:
    """One sample to look at.

    Attributes:
        split: the name of its split.
        key: its key.
        class_name: name of its label; None without one.
        values: by column but `key`; no blobs.
        blob_bytes: size of each blob by column.
        images: the encoded images by column, in the order of the columns.
    """

    split: str
    key: str
    class_name: str | None
    values: Mapping[str, Any]
    blob_bytes: Mapping[str, int]
    images: Mapping[str, bytes]


def preview_samples(split: Split, num_samples: int) -> Iterator[Preview]:
    """Yield the first samples of a split that are not deleted, in the order of its table.

    Raises:
        ConfigError: `num_samples` is negative.
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    if num_samples < 0:
        raise ConfigError(f"cannot show {num_samples} samples; give 0 or more")
    schema = split.table.sample_schema
    return (_preview(split, schema, sample) for sample in islice(split, num_samples))


def thumbnail(encoded: bytes, max_side: int) -> Image.Image:
    """Return an image as RGB, upright, neither side longer than `max_side` pixels.

    Raises:
        BadSampleError: it does not decode.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            image.draft("RGB", (max_side, max_side))  # lets a JPEG decode small at once
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # whatever a damaged file makes Pillow raise
        raise BadSampleError(f"does not decode: {error}") from error
    upright.thumbnail((max_side, max_side))
    return upright


def _preview(split: Split, schema: pa.Schema, sample: Mapping[str, Any]) -> Preview:
    blobs = {field.name: sample[field.name] for field in schema if is_blob(field.type)}
    held = {name: blob for name, blob in blobs.items() if blob is not None}
    return Preview(
        split.name,
        sample[KEY],
        _class_name(sample.get(LABEL), split.classes),
        {name: value for name, value in sample.items() if name != KEY and name not in held},
        {name: len(blob) for name, blob in held.items()},
        {
            field.name: held[field.name]
            for field in schema
            if field.name in held and (field.name == IMAGE or is_image(field))
        },
    )


def _class_name(label: Any, classes: Sequence[str]) -> str | None:
    return classes[label] if isinstance(label, int) and 0 <= label < len(classes) else None

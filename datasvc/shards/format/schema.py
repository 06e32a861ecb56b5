"""Schemas of shards: their columns, and the number of the shard format. A shard is a plain Arrow IPC file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError

SHARD_FORMAT = 2
_FORMAT: Final = b"datasvc.shard.format"
_PLAIN: Final = b"1"
_COMPRESSED: Final = b"2"  # of a shard with compressed columns, which earlier releases refuse

KEY, IMAGE, LABEL, WIDTH, HEIGHT = "key", "image", "label", "width", "height"
# Objects in images, a list per sample: boxes are left, top, right and bottom in pixels of the upright image.
BOXES, BOX_LABELS, KEYPOINTS, POLYGONS = "boxes", "box_labels", "keypoints", "polygons"
MASK_RUNS: Final = "mask_runs"
"""Column of the run lengths of objects without polygons, see `run_lengths`; [] for the others."""
BOX_CLASSES: Final = b"datasvc.box_classes"
"""Metadata of a source or a shard with `box_labels`: the names of the classes by label, as a JSON list."""
AUDIO, RATE, CHANNELS, FRAMES, DURATION = "audio", "rate", "channels", "frames", "duration"
VIDEO, VIDEO_WIDTH, VIDEO_HEIGHT, VIDEO_FRAMES = "video", "video_width", "video_height", "video_frames"
VIDEO_PTS, VIDEO_KEYS = "video_pts", "video_key_frames"
# Columns that the ingest measures of the encoded files in a column. Those of sounds: frames per second, channels,
# frames, and seconds. Those of videos have a prefix, because samples may have images and sounds too.
_IMAGE_COLUMNS: Final = {WIDTH: pa.int32(), HEIGHT: pa.int32()}
_AUDIO_COLUMNS: Final = {RATE: pa.int32(), CHANNELS: pa.int32(), FRAMES: pa.int64(), DURATION: pa.float64()}
# In the order of `read_video_header`; duration and time base are in seconds, and `video_pts` are in time bases.
_VIDEO_COLUMNS: Final = {
    VIDEO_WIDTH: pa.int32(),
    VIDEO_HEIGHT: pa.int32(),
    VIDEO_FRAMES: pa.int64(),
    "video_duration": pa.float64(),
    "video_fps": pa.float64(),
    "video_time_base": pa.float64(),
    "video_codec": pa.string(),
    VIDEO_PTS: pa.list_(pa.int64()),
    VIDEO_KEYS: pa.list_(pa.struct([pa.field(name, pa.int64()) for name in ("pts", "dts", "offset")])),
}
_KIND: Final = b"datasvc.kind"  # in the metadata of a source's column: `image`, `audio` or `video`, encoded in it
_PREFIX: Final = b"datasvc."
REDACTED: Final = b"datasvc.redacted"
"""Metadata of a shard with purged samples: a bitmap of its rows, lowest bit first, as hexadecimal digits."""
_MAX_DIGITS: Final = 10  # a format number has fewer digits; a longer one is damage


def image_schema(*, labelled: bool) -> pa.Schema:
    """Return the schema of image samples.

    `image` has the encoded file unchanged. `width` and `height` are in pixels after the EXIF rotation, so that a crop
    can be chosen before the image is decoded. `label` is an index into the class names of the shard table.
    """
    fields = [pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE)]
    if labelled:
        fields.append(pa.field(LABEL, pa.int32(), nullable=False))
    return stored_schema(pa.schema(fields))


def image_field(name: str, *, nullable: bool = False) -> pa.Field:
    """Return the field by which a source declares a column of encoded images."""
    return pa.field(name, pa.large_binary(), nullable=nullable, metadata={_KIND: b"image"})


def is_image(field: pa.Field) -> bool:
    """Return whether a column of a source holds encoded images."""
    return (field.metadata or {}).get(_KIND) == b"image"


def audio_field(name: str, *, nullable: bool = False) -> pa.Field:
    """Return the field by which a source declares a column of encoded sounds."""
    return pa.field(name, pa.large_binary(), nullable=nullable, metadata={_KIND: b"audio"})


def is_audio(field: pa.Field) -> bool:
    """Return whether a column of a source holds encoded sounds."""
    return (field.metadata or {}).get(_KIND) == b"audio"


def video_field(name: str, *, nullable: bool = False) -> pa.Field:
    """Return the field by which a source declares a column of encoded videos."""
    return pa.field(name, pa.large_binary(), nullable=nullable, metadata={_KIND: b"video"})


def is_video(field: pa.Field) -> bool:
    """Return whether a column of a source holds encoded videos."""
    return (field.metadata or {}).get(_KIND) == b"video"


def is_media(field: pa.Field) -> bool:
    """Return whether a column of a source holds encoded images, sounds or videos, which the ingest checks."""
    return is_image(field) or is_audio(field) or is_video(field)


def added_columns(field: pa.Field) -> dict[str, pa.DataType]:
    """Return the columns that the ingest adds after a source's column, with their types."""
    if field.name == IMAGE and is_image(field):
        return dict(_IMAGE_COLUMNS)
    if field.name == VIDEO and is_video(field):
        return dict(_VIDEO_COLUMNS)
    return dict(_AUDIO_COLUMNS) if field.name == AUDIO and is_audio(field) else {}


def stored_schema(source: pa.Schema) -> pa.Schema:
    """Return the shard schema for a source's columns, with the `added_columns` after those of media.

    Metadata of the source with the prefix `datasvc.`, such as a tokenizer's digest, is kept.

    Raises:
        ConfigError: see `shard_schema`.
    """
    fields: list[pa.Field] = []
    for field in source:
        added = added_columns(field)
        fields.append(field.remove_metadata() if added else field)
        fields += [pa.field(name, data_type, nullable=False) for name, data_type in added.items()]
    metadata = {name: value for name, value in (source.metadata or {}).items() if name.startswith(_PREFIX)}
    return shard_schema(fields, metadata)


def shard_schema(fields: list[pa.Field], metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """Return a shard's schema with `fields`, the number of the shard format, and further `metadata`.

    Raises:
        ConfigError: there is no `key` column of strings, or two columns have the same name.
    """
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ConfigError(f"column names must be unique; got {names}")
    if KEY not in names or fields[names.index(KEY)].type != pa.string():
        raise ConfigError(f"a shard needs a column {KEY!r} of strings, unique in its split; got the columns {names}")
    # The format number comes last, so that `metadata` does not override it.
    return pa.schema(fields, metadata={**(metadata or {}), _FORMAT: _PLAIN})


def with_compression(schema: pa.Schema, *, compressed: bool) -> pa.Schema:
    """Return a shard's schema in the format of shards with compressed columns, or in that of others."""
    return schema.with_metadata({**(schema.metadata or {}), _FORMAT: _COMPRESSED if compressed else _PLAIN})


def has_compression(schema: pa.Schema) -> bool:
    """Return whether columns of a shard may be compressed; in a shard table, those of some shards."""
    return (schema.metadata or {}).get(_FORMAT) == _COMPRESSED


def is_compressible(data_type: pa.DataType) -> bool:
    """Return whether columns of this type may be compressed: text, and numbers of any kind, but no lists.

    Loaders copy blobs and lists, such as tokens, from the mapped file.
    """
    return is_text(data_type) or bool(pa.types.is_primitive(data_type) or pa.types.is_decimal(data_type))


def with_redacted(schema: pa.Schema, flags: npt.NDArray[np.bool_]) -> pa.Schema:
    """Return a shard's schema that marks rows as redacted, and no others; `flags` is `bool[num_samples]`."""
    others = {name: value for name, value in (schema.metadata or {}).items() if name != REDACTED}
    bitmap = {REDACTED: np.packbits(flags, bitorder="little").tobytes().hex().encode()} if flags.any() else {}
    return schema.with_metadata({**others, **bitmap})


def redacted_rows(schema: pa.Schema, num_samples: int, name: str) -> npt.NDArray[np.int64]:
    """Return the rows of a shard that were purged: `int64[n]`, ascending. Raise CorruptDataError: no valid bitmap."""
    stored = (schema.metadata or {}).get(REDACTED)
    if stored is None:
        return np.empty(0, np.int64)
    try:
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(stored.decode()), np.uint8), bitorder="little")
    except ValueError as error:
        raise CorruptDataError(f"{name} has no valid bitmap of redacted rows: {error}") from error
    if not num_samples <= len(bits) < num_samples + 8 or bits[num_samples:].any():
        raise CorruptDataError(f"{name} has a bitmap of redacted rows that does not match its {num_samples} samples")
    return np.flatnonzero(bits).astype(np.int64)


def parse_box_classes(metadata: bytes | None) -> tuple[str, ...]:
    """Return the names in a value of `BOX_CLASSES`. Raises CorruptDataError: it is no JSON list of names."""
    try:
        names = json.loads(metadata or b"[]")
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"the classes of boxes are not JSON: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptDataError("the classes of boxes are not a list of names")
    return tuple(names)


def measured_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns of a shard's schema that an ingest has measured; () for any other schema."""
    return measured_among(schema, schema.names) if _FORMAT in (schema.metadata or {}) else ()


def measured_among(schema: pa.Schema, names: Collection[str]) -> tuple[str, ...]:
    """Return the measured columns of samples that have the columns `names`, some of them in `schema`."""
    found: tuple[str, ...] = (WIDTH, HEIGHT) if IMAGE in names else ()
    for media, columns in ((AUDIO, _AUDIO_COLUMNS), (VIDEO, _VIDEO_COLUMNS)):
        # By their types too: a source's own column `audio` of bytes may have a neighbour that is called `rate`.
        if media in names and all(
            name in schema.names and schema.field(name).type == data_type for name, data_type in columns.items()
        ):
            found += (*columns,)
    return found


def is_gathered(data_type: pa.DataType) -> bool:
    """Return whether a writer copies values of this type one by one into a buffer, as it does for blobs and text."""
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(data_type) for check in checks)


def is_text(data_type: pa.DataType) -> bool:
    """Return whether values are strings."""
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def is_list(data_type: pa.DataType) -> bool:
    """Return whether values are lists, of fixed length or not."""
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(check(data_type) for check in checks)


def has_integer_lists(schema: pa.Schema, column: str, *, or_booleans: bool = False) -> bool:
    """Return whether a column exists and has lists of integers; with `or_booleans`, or of Booleans."""
    kind = schema.field(column).type if column in schema.names else None
    if kind is None or not is_list(kind):
        return False
    return bool(pa.types.is_integer(kind.value_type) or (or_booleans and pa.types.is_boolean(kind.value_type)))


def offset_dtype(data_type: pa.DataType) -> type[np.int32 | np.int64]:
    """Return the type of the offsets in Arrow arrays of blobs, texts, lists or maps."""
    checks = (pa.types.is_large_binary, pa.types.is_large_string, pa.types.is_large_list)
    return np.int64 if any(check(data_type) for check in checks) else np.int32


def is_blob(data_type: pa.DataType) -> bool:
    """Return whether values of this type are blobs: bytes that readers return as zero-copy views."""
    return bool(pa.types.is_large_binary(data_type))


def check_shard_schema(schema: pa.Schema, name: str) -> None:
    """Check the schema of a stored shard.

    Raises:
        ConfigError: the schema has no shard format, or a newer one than this datasvc reads.
        CorruptDataError: the format is not a number, or there is no column `key` of strings.
    """
    stored = (schema.metadata or {}).get(_FORMAT)
    if stored is not None and not (stored.isdigit() and len(stored) < _MAX_DIGITS):
        raise CorruptDataError(f"{name} has the shard format {stored[:20]!r}, which is not a number")
    if stored is None or int(stored) > SHARD_FORMAT:
        found = stored.decode() if stored else "none"
        raise ConfigError(f"{name} has shard format {found}; this datasvc reads up to {SHARD_FORMAT}")
    if KEY not in schema.names or schema.field(KEY).type != pa.string():
        raise CorruptDataError(f"{name} has no column {KEY!r} of strings; restore it from another copy")


# `ShardWriter` has one for each such column. The buffer is reused because allocating new memory takes longer than
# copying a blob. A blob that is read from its file directly into the buffer is not copied at all.


class BlobColumn:
    """The bytes of one column in a buffer of `initial_bytes`, which grows as needed and never shrinks."""

    def __init__(self, initial_bytes: int) -> None:
        self._buffer = np.empty(initial_bytes, np.uint8)
        self._view = self._buffer.data
        self._offsets = [0]  # start of each blob in the buffer, and the end of the last one
        self._nulls: list[int] = []  # rows that are null
        self._reserved: memoryview | None = None  # result of the last `reserve`

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Size of each blob in bytes: `int64[samples]`."""
        offsets = np.array(self._offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    def reserve(self, size_bytes: int) -> memoryview:
        """Return the memory of the next blob. If the blob is written there, `append` does not copy it."""
        start = self._offsets[-1]
        stop = start + size_bytes
        if stop > len(self._view):
            # At least double the size, so that a growing buffer is copied only a few times.
            grown = np.empty(max(stop, 2 * len(self._buffer)), np.uint8)
            grown[:start] = self._buffer[:start]
            self._buffer, self._view = grown, grown.data
        self._reserved = reserved = self._view[start:stop]
        return reserved

    def append(self, blob: bytes | memoryview | npt.NDArray[np.uint8] | None) -> int:
        """Add a blob, None for null, and return its size in bytes. The result of the last `reserve` is not copied."""
        offsets = self._offsets
        if blob is None:
            self._nulls.append(len(offsets) - 1)
            offsets.append(offsets[-1])
            return 0
        # Compare by identity: only the memoryview that `reserve` returned has its bytes in the buffer already.
        if blob is not self._reserved:
            view = np.frombuffer(blob, np.uint8)
            self.reserve(len(view))[:] = view.data
        size_bytes = len(blob)
        offsets.append(offsets[-1] + size_bytes)
        self._reserved = None
        return size_bytes

    def take(self, data_type: pa.DataType) -> pa.Array:
        """Return the blobs as an array, which is valid until the next `append`, and start an empty column."""
        count = len(self._offsets) - 1
        offsets = pa.py_buffer(np.array(self._offsets, offset_dtype(data_type)))
        content = pa.py_buffer(self._buffer[: self._offsets[-1]])
        array = pa.Array.from_buffers(data_type, count, [_validity(count, self._nulls), offsets, content])
        # The next batch overwrites the buffer, so the caller must write this batch before the next `append`.
        self._offsets, self._nulls, self._reserved = [0], [], None
        return array


def _validity(count: int, nulls: list[int]) -> pa.Buffer | None:
    """Return Arrow's validity bitmap, one bit per value, lowest bit first; None if no row is null."""
    if not nulls:
        return None
    valid = np.ones(count, np.bool_)
    valid[nulls] = False
    return pa.py_buffer(np.packbits(valid, bitorder="little"))

"""What the sources of images with boxes share: COCO, YOLO and Pascal VOC.

The stored form is the same for all: `boxes` has left, top, right and bottom of each object in pixels of the upright
image, `box_labels` its class, and further columns one value per object. The schema has the names of the classes
(`BOX_CLASSES`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.schema import (
    BOX_CLASSES,
    BOX_LABELS,
    BOXES,
    IMAGE,
    KEY,
    KEYPOINTS,
    MASK_RUNS,
    POLYGONS,
    image_field,
)
from datasvc.shards.images.header import EXTENSIONS, ImageHeader
from datasvc.shards.images.run_lengths import scale_runs
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, extension_of, find_below
from datasvc.shards.sources.common.source import ListedFile, ListedSource

BOX_AREA: Final = "box_area"
MAX_SMALL_BYTES: Final = 16 << 20  # of a file with the annotations of one image, or of a list
_READING_THREADS: Final = 16
_MAX_BOXES: Final = 100_000  # of one image
_FIRST_COLUMN: Final = 3  # of the columns after key, image and boxes


class Annotation(NamedTuple):
    """The objects of one image, as a file lists them.

    Attributes:
        boxes: left, top, right and bottom of each object.
        values: the further columns, in the order of the source's schema: a value for each object.
        size: width and height of the image in which `boxes` are pixels; None: `boxes` are fractions of the sides.
        reason: why the annotation cannot be used; then the image is a bad sample.
    """

    boxes: list[list[float]]
    values: tuple[list[Any], ...]
    size: tuple[int, int] | None = None
    reason: str = ""


@dataclass(frozen=True)
class AnnotatedSource(ListedSource):
    """Images with boxes, listed by a subclass. Until an image is read, its `ListedFile.values` is an `Annotation`."""

    url: str
    schema: pa.Schema
    splits: dict[str, list[ListedFile]]
    classes: tuple[str, ...] = ()  # those of the column `label`, which these sources do not have
    ignored: Counter[str] = field(default_factory=Counter)

    @property
    def box_classes(self) -> tuple[str, ...]:
        """Names of the classes of `box_labels`, by label."""
        return tuple(json.loads(self.schema.metadata[BOX_CLASSES]))

    def complete(self, file: ListedFile, header: ImageHeader) -> ListedFile:
        """Return a file with the values of its columns, in pixels of the image as it is stored."""
        annotation = Annotation(*file.values)
        if annotation.reason:
            raise BadSampleError(annotation.reason)
        if len(annotation.boxes) > _MAX_BOXES:
            raise BadSampleError(f"its annotation has {len(annotation.boxes)} boxes; expected at most {_MAX_BOXES}")
        if not all(math.isfinite(number) for box in annotation.boxes for number in box):
            raise BadSampleError("a box of its annotation is not finite")
        columns = dict(zip(self.schema.names[_FIRST_COLUMN:], annotation.values, strict=True))
        polygons = chain.from_iterable(columns.get(POLYGONS, ()))
        if not all(math.isfinite(number) for polygon in polygons for number in polygon):
            raise BadSampleError("a polygon of its annotation is not finite")
        width, height = annotation.size or (1, 1)
        # One pixel is allowed for the rounding of an image that is stored smaller.
        difference = abs(width * header.height - height * header.width)
        if annotation.size and difference > max(width, height, header.width, header.height):
            raise BadSampleError(
                f"is {header.width}x{header.height} pixels, and its annotation is for {width}x{height}; if the "
                "camera turned the picture, annotate it upright"
            )
        across, down = header.width / width, header.height / height
        if KEYPOINTS in columns:
            columns[KEYPOINTS] = _scale(columns[KEYPOINTS], across, down, 1)
        if POLYGONS in columns:
            columns[POLYGONS] = [_scale(polygons, across, down) for polygons in columns[POLYGONS]]
        if MASK_RUNS in columns:
            # Until now with the size of their mask, which may be another one than that of the annotation.
            columns[MASK_RUNS] = [
                [] if mask is None else scale_runs(mask[0], mask[1], mask[2], header.width, header.height)
                for mask in columns[MASK_RUNS]
            ]
        if BOX_AREA in columns:
            columns[BOX_AREA] = [area * across * down for area in columns[BOX_AREA]]
        return file._replace(values=(_scale(annotation.boxes, across, down), *columns.values()))

    @classmethod
    def of(
        cls,
        url: str,
        names: Sequence[str],
        columns: Mapping[str, pa.DataType],
        splits: Mapping[str, Iterable[ListedFile]],
        ignored: Counter[str],
    ) -> Self:
        """Return a source of these files; `names` are the classes, `columns` the further columns of objects.

        Raises:
            NotFoundError: there is no file.
            ConfigError: two classes have one name.
        """
        if not any(splits.values()):
            raise NotFoundError(f"cannot ingest {redact_url(url)}: its annotations list no images")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ConfigError(f"{redact_url(url)} has several classes with the name {twice[0]!r}; rename them")
        fields = [pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE)]
        fields.append(pa.field(BOXES, pa.list_(pa.list_(pa.float64(), 4))))
        fields += [pa.field(name, pa.list_(kind)) for name, kind in columns.items()]
        metadata = {BOX_CLASSES: json.dumps(list(names), ensure_ascii=False).encode()}
        ordered = {split: sorted(files, key=attrgetter("key")) for split, files in splits.items()}
        return cls(url, pa.schema(fields, metadata=metadata), ordered, (), ignored)


def _scale(rows: Iterable[Sequence[float]], *factors: float) -> list[list[float]]:
    """Return the rows with their numbers multiplied by the factors in turn."""
    return [[number * factor for number, factor in zip(row, cycle(factors), strict=False)] for row in rows]


@dataclass
class AnnotatedFolder:
    """The files below a source: images and files of annotations, found by their names.

    Attributes:
        used: files that the source uses; all others are counted by `ignored`.
    """

    url: str
    files: dict[str, SourceFile]
    hidden: Counter[str]
    reader: FileReader
    used: set[str] = field(default_factory=set)

    @classmethod
    def find(cls, url: str) -> Self:
        """List a folder. For errors, see `find_below`."""
        files, _, hidden = find_below(url)
        return cls(url, files, hidden, FileReader(url))

    def names(self, *extensions: str) -> list[str]:
        """Return the files with these extensions, in order; without one, the images."""
        kinds = extensions or tuple(EXTENSIONS)
        return sorted(name for name in self.files if extension_of(name) in kinds)

    def text(self, name: str, *, limit_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """Return the content of a file. Raises ConfigError: it is larger than the limit; or as `FileReader.read`."""
        file = self.files[name]
        if file.size_bytes > limit_bytes:
            raise ConfigError(f"{name} has {file.size_bytes} bytes; expected annotations of at most {limit_bytes}")
        self.used.add(name)
        return self.reader.read(file.path)

    def texts(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files, read in parallel. For errors, see `text`."""
        with ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="datasvc-annotations") as pool:
            return list(pool.map(partial(self.text), names))

    def image(self, name: str, key: str, annotation: Annotation) -> ListedFile:
        """Return an image of the listing. A change of its annotation changes the fingerprint of the source."""
        file = self.files[name]
        self.used.add(name)
        return ListedFile(key, file.path, file.size_bytes, None, file.stamp, tuple(annotation))

    def ignored(self) -> Counter[str]:
        """Return the number of files that the source does not use, by extension."""
        return self.hidden + Counter(extension_of(name) or "(none)" for name in self.files.keys() - self.used)


def require(found: Sequence[str], url: str, what: str) -> None:
    """Raise NotFoundError if no file of annotations is found."""
    if not found:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: it has no {what}")


def check_missing(missing: Sequence[str], total: int, url: str) -> None:
    """Raise NotFoundError if annotations name images that are not there."""
    if missing:
        raise NotFoundError(
            f"{count_text(len(missing), 'image')} of {total} in the annotations of {redact_url(url)} are not there, "
            f"such as {', '.join(missing[:3])}; add them, or remove their annotations"
        )


BOX_COLUMNS: Final[dict[str, pa.DataType]] = {BOX_LABELS: pa.int32()}
"""The further columns that each of these sources has."""

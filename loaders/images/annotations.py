"""What a sample of `ImageLoader` has besides its first image: other images, masks, boxes, keypoints and polygons.

All of it follows the window and the flip of the first image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.augment.mosaic import Mosaics
from datasvc.loaders.augment.objects import (
    ObjectConfig,
    View,
    boxes_of_masks,
    find_bad_boxes,
    map_boxes,
    map_keypoints,
    read_boxes,
    read_keypoints,
)
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.mixture import Mixture, check_column, weighted_splits
from datasvc.shards import Split
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.schema import (
    BOX_CLASSES,
    BOX_LABELS,
    IMAGE,
    MASK_RUNS,
    is_blob,
    is_list,
    parse_box_classes,
)
from datasvc.shards.images.header import read_header

Drawn = Future[tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]]
"""The result of `draw_masks`, in another thread."""
_KINDS: Final = {"images": "encoded images", "masks": "encoded masks"}


@dataclass(frozen=True)
class AnnotationColumns:
    """The columns of `ImageLoader`'s arguments `images`, `masks`, `boxes`, `keypoints` and `polygons`, see `of`.

    Attributes:
        values: the columns with a number per object: name -> its dtype.
        runs: the column of run lengths, for objects without polygons; None if the data set has none, or without
            `polygons`.
        classes: names of the classes of `box_labels`, by label; () if the data set has none.
    """

    images: tuple[str, ...] = (IMAGE,)
    masks: tuple[str, ...] = ()
    boxes: str | None = None
    keypoints: str | None = None
    polygons: str | None = None
    objects: ObjectConfig = field(default_factory=ObjectConfig)
    values: Mapping[str, Any] = field(default_factory=dict)
    runs: str | None = None
    num_keypoints: int = 0
    classes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        samples: Split | Mixture,
        images: Sequence[str],
        masks: Sequence[str],
        boxes: str | None,
        keypoints: str | None,
        polygons: str | None,
        objects: ObjectConfig | None,
        *,
        may_flip: bool,
    ) -> AnnotationColumns:
        """Return the columns. `may_flip`: whether images are flipped.

        Raises:
            ConfigError: a split lacks one of the columns, or it has another type; no image is given, or a column is
                given twice; or settings are missing, see `ObjectConfig`.
        """
        given = {"images": (images,) if isinstance(images, str) else tuple(images), "masks": tuple(masks)}
        named = [*given["images"], *given["masks"]]
        if not given["images"] or len(set(named)) < len(named):
            raise ConfigError(f"images and masks are {named}; expected at least one image, and each column once")
        for argument, names in given.items():
            for name in names:
                check_column(samples, name, argument)
                if not all(is_blob(data_type) for data_type in _types(samples, name)):
                    raise ConfigError(f"{argument}: the column {name!r} does not hold {_KINDS[argument]}")
        config = objects or ObjectConfig()
        if boxes is None and keypoints is None and polygons is None:
            if objects is not None:
                raise ConfigError("objects is given without boxes=, keypoints= or polygons=, whose settings it has")
            return cls(given["images"], given["masks"])
        if config.fit_to_masks and polygons is None:
            raise ConfigError("ObjectConfig(fit_to_masks=True) needs the masks of objects: give polygons=")
        for column in filter(None, (boxes, keypoints, polygons)):
            check_column(samples, column)
            types = _types(samples, column)
            if not all(map(_is_list_of_lists, types)):
                raise ConfigError(f"the column {column!r} is not a list of lists of numbers, one list per object")
            if column == polygons and not all(_is_list_of_lists(data_type.value_type) for data_type in types):
                raise ConfigError(f"the column {column!r} has no list of polygons per object, each a list of x and y")
        num_keypoints = 0 if keypoints is None else _count_keypoints(samples, keypoints, config, may_flip=may_flip)
        values = {name: _value_dtype(samples, name) for name in _value_columns(samples, config)}
        classes = _classes(samples) if BOX_LABELS in values else ()
        schemas = [split.table.sample_schema for split in weighted_splits(samples)]
        # A column of this name and another type is one of the user's own.
        has_runs = polygons is not None and any(
            MASK_RUNS in schema.names and _is_list_of_lists(schema.field(MASK_RUNS).type) for schema in schemas
        )
        return cls(
            images=given["images"],
            masks=given["masks"],
            boxes=boxes,
            keypoints=keypoints,
            polygons=polygons,
            objects=config,
            values=values,
            runs=MASK_RUNS if has_runs else None,
            num_keypoints=num_keypoints,
            classes=classes,
        )

    @property
    def has_objects(self) -> bool:
        """Whether batches have objects."""
        return any(name is not None for name in (self.boxes, self.keypoints, self.polygons))

    @property
    def has_masks(self) -> bool:
        """Whether batches have masks, encoded or drawn."""
        return bool(self.masks) or self.polygons is not None

    @property
    def lists(self) -> list[str]:
        """The columns of objects, which are read as Python lists."""
        return [name for name in (self.boxes, self.keypoints, *self.values) if name is not None]

    @property
    def has_stored_sizes(self) -> bool:
        """Whether the data set has the size of the first image; otherwise its header is read for each batch."""
        return self.images[0] == IMAGE

    def views(self, windows: Windows, widths: Integers, heights: Integers, size: int) -> list[View]:
        """Return what the output shows of each first image; `size`: its side, unless `windows` has sizes."""
        rows = zip(windows.scaled, windows.flips.tolist(), widths.tolist(), heights.tolist(), strict=True)
        shown = [(size, size)] * len(widths) if windows.sizes is None else windows.sizes[:, ::-1].tolist()
        return [
            View(region, bool(flip), max(width, 1), max(height, 1), (across, down))
            for (region, flip, width, height), (across, down) in zip(rows, shown, strict=True)
        ]


def _types(samples: Split | Mixture, name: str) -> list[pa.DataType]:
    return [split.table.sample_schema.field(name).type for split in weighted_splits(samples)]


def _is_list_of_lists(data_type: pa.DataType) -> bool:
    return is_list(data_type) and (is_list(data_type.value_type) or pa.types.is_null(data_type.value_type))


def _value_columns(samples: Split | Mixture, config: ObjectConfig) -> tuple[str, ...]:
    if config.columns is not None:
        return tuple(dict.fromkeys(config.columns))
    has_labels = all(BOX_LABELS in split.table.sample_schema.names for split in weighted_splits(samples))
    return (BOX_LABELS,) if has_labels else ()


def _value_dtype(samples: Split | Mixture, name: str) -> Any:
    """Return the dtype of a column with a number per object, int64 for integers. Raises ConfigError for others."""
    check_column(samples, name)
    inner = {data_type.value_type for data_type in _types(samples, name) if is_list(data_type)}
    kinds = {pa.types.is_integer: np.int64, pa.types.is_boolean: np.bool_, pa.types.is_floating: np.float32}
    for is_kind, dtype in kinds.items():
        if inner and all(map(is_kind, inner)):
            return dtype
    raise ConfigError(f"the column {name!r} is not a list of numbers or booleans, one per object; leave it out")


def _count_keypoints(samples: Split | Mixture, name: str, config: ObjectConfig, *, may_flip: bool) -> int:
    if may_flip and config.flip_pairs is None:
        raise ConfigError(
            "images are flipped, which may turn a left keypoint into a right one: give objects=ObjectConfig("
            "flip_pairs=...) with the pairs that change places, () for none, or AugmentConfig(flip=0)"
        )
    sizes = {getattr(data_type.value_type, "list_size", 0) // 3 for data_type in _types(samples, name)}
    count = config.num_keypoints or (sizes.pop() if len(sizes) == 1 else 0)
    if not count:
        raise ConfigError(f"the type of {name!r} does not say how many keypoints an object has; give num_keypoints")
    if max((number for pair in config.flip_pairs or () for number in pair), default=0) >= count:
        raise ConfigError(f"flip_pairs is {config.flip_pairs}, and an object has {count} keypoints, from 0")
    return count


def _classes(samples: Split | Mixture) -> tuple[str, ...]:
    """Return the class names of boxes. Raises ConfigError: the splits of a mixture have different ones."""
    found = {(split.table.sample_schema.metadata or {}).get(BOX_CLASSES, b"[]") for split in weighted_splits(samples)}
    if len(found) > 1:
        raise ConfigError("the splits of the mixture have different classes of boxes; ingest them with equal classes")
    return parse_box_classes(found.pop())


def read_blobs(batch: SampleBatch, column: str) -> list[Bytes]:
    """Return the encoded values of a column of a batch, as `SampleBatch.blobs`; empty for null."""
    blobs: list[Any] = [None] * len(batch.positions)
    for part in batch.parts:
        for index, blob in zip(part.indices.tolist(), part.shard.blobs(column, part.rows), strict=True):
            blobs[index] = blob
    return blobs


def read_sizes(batch: SampleBatch) -> tuple[Integers, Integers]:
    """Return widths and heights of the images `batch.blobs`, `int64[n]` each, by their headers; 1 if that fails."""
    sizes = np.ones((2, len(batch.blobs)), np.int64)
    shards = batch.sample_shards
    for index, blob in enumerate(batch.blobs):
        try:
            header = read_header(shards[index].read(blob, np.empty(len(blob), np.uint8)).data)
        except BadSampleError:
            continue  # the decoder finds it too, and names it
        sizes[:, index] = header.width, header.height
    return sizes[0], sizes[1]


@dataclass
class BatchObjects:
    """The objects of a batch while they are collected.

    Attributes:
        bad: samples whose lists are not valid, or that `ObjectConfig.on_bad` masks: index -> reason.
        raised: samples for which `ObjectConfig.on_bad` raises an error: index -> reason.
        num_bad_boxes: bad boxes that were dropped.
    """

    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    raised: dict[int, str] = field(default_factory=dict)
    num_bad_boxes: int = 0


def collect_objects(
    columns: AnnotationColumns,
    lists: Mapping[str, Sequence[Any]],
    views: Mapping[int, View],
    drawn: Mapping[int, Drawn],
    frame: tuple[int, int],
    mosaics: Mosaics | None = None,
) -> BatchObjects:
    """Return the objects of a batch as its output shows them.

    Args:
        columns: the columns.
        lists: values of `columns.lists` for each sample.
        views: views of the samples whose objects are wanted, by their index in the batch, ascending.
        drawn: masks of these samples, see `draw_masks`; empty without polygons.
        frame: height and width of the output in pixels.
        mosaics: the images of each output; None: its own. With them, there is an array `origins`.
    """
    found, rows = BatchObjects(), []
    stored = {index: {name: lists[name][index] for name in columns.lists} for index in views}
    for index, view in views.items():
        try:
            rows.append((index, _sample_objects(columns, stored[index], view, found, index, drawn.get(index))))
        except BadSampleError as error:
            found.bad[index] = str(error)
    if mosaics is not None:
        rows = list(_mosaic_objects(columns, stored, views, drawn, found, mosaics))
    empty: dict[str, Any] = {"samples": np.int64, "numbers": np.int64, **columns.values}
    shapes: dict[str, tuple[int, ...]] = {"boxes": (0, 4)} if columns.boxes else {}
    shapes |= {"keypoints": (0, columns.num_keypoints, 3)} if columns.keypoints else {}
    empty |= {} if mosaics is None else {"origins": np.int64}
    joined = {name: [np.empty(0, dtype)] for name, dtype in empty.items()}
    joined |= {name: [np.empty(shape, np.float32)] for name, shape in shapes.items()}
    masks: list[npt.NDArray[np.uint8]] = []
    for index, collected in rows:
        if index not in found.bad:
            objects = _fit(collected, columns.objects) if columns.objects.fit_to_masks else collected
            objects["samples"] = np.full(len(objects["numbers"]), index, np.int64)
            masks += [objects.pop("masks")] if columns.polygons else []
            for name, values in objects.items():
                joined[name].append(values)
    found.arrays = {name: np.concatenate(parts) for name, parts in joined.items()}
    if columns.polygons:
        found.arrays["masks"] = _join(masks, frame)
    return found


def _mosaic_objects(
    columns: AnnotationColumns,
    stored: Mapping[int, dict[str, Any]],
    views: Mapping[int, View],
    drawn: Mapping[int, Drawn],
    found: BatchObjects,
    mosaics: Mosaics,
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]]]]:
    """Yield the objects of each tile of each output that shows a sample which is not bad, with the output's index."""
    good = {index: view for index, view in views.items() if index not in found.bad}
    for index in good:
        for tile in mosaics.tiles(index):
            if tile.source not in good:
                continue
            view = tile.view(good[tile.source])
            counted = BatchObjects()  # bad boxes are counted where the whole image is collected
            objects = _sample_objects(columns, stored[tile.source], view, counted, index, drawn.get(tile.source))
            corner = np.array([tile.columns.start, tile.rows.start], np.float32)
            if "boxes" in objects:
                objects["boxes"] += np.tile(corner, 2)
                # Far from 0, float32 has fewer digits after the point, so a very thin box may have lost its area.
                has_area = (objects["boxes"][:, 2:] > objects["boxes"][:, :2]).all(axis=1)
                objects = {name: values[has_area] for name, values in objects.items()}
            if "keypoints" in objects:
                objects["keypoints"][..., :2] += corner * (objects["keypoints"][..., 2:] > 0)
            if "masks" in objects:
                masks = np.zeros_like(objects["masks"])
                masks[:, tile.rows, tile.columns] = objects["masks"][:, tile.source_rows, tile.source_columns]
                objects["masks"] = masks
            yield index, objects | {"origins": np.full(len(objects["numbers"]), tile.source, np.int64)}


def _fit(objects: dict[str, npt.NDArray[Any]], config: ObjectConfig) -> dict[str, npt.NDArray[Any]]:
    """Return objects with the boxes of their masks; see `ObjectConfig.fit_to_masks`."""
    boxes = boxes_of_masks(objects["masks"])
    sides = boxes[:, 2:] - boxes[:, :2]
    is_kept = (sides > 0).all(axis=1) & (sides >= config.min_side).all(axis=1)
    fitted = objects | ({"boxes": boxes} if "boxes" in objects else {})
    return {name: values[is_kept] for name, values in fitted.items()}


def _join(parts: list[npt.NDArray[np.uint8]], frame: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return the masks of all samples, with zeros to their right and below them, up to the size of the output."""
    # Written to their place: padded parts that are then joined take twice the memory.
    joined, start = np.zeros((sum(map(len, parts)), *frame), np.uint8), 0
    for masks in parts:
        stop = start + len(masks)
        joined[start:stop, : masks.shape[1], : masks.shape[2]] = masks
        start = stop
    return joined


def _sample_objects(
    columns: AnnotationColumns,
    stored: dict[str, Any],
    view: View,
    found: BatchObjects,
    index: int,
    drawn: Drawn | None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the objects of a sample by column. Raises BadSampleError: its lists differ in length or form.

    Boxes and keypoints in `stored` become arrays, so that other tiles of a mosaic do not parse their lists again.
    """
    config = columns.objects
    given = {name: len(value) for name, value in stored.items() if value is not None}
    has_mask, masks = (None, None) if drawn is None else drawn.result()
    if has_mask is not None and len(has_mask):
        given["polygons"] = len(has_mask)
    if len(set(given.values())) > 1:
        raise BadSampleError(f"its lists differ in length: {given}")
    objects: dict[str, npt.NDArray[Any]] = {}
    numbers: Integers = np.arange(max(given.values(), default=0))
    if columns.boxes is not None:
        boxes = read_boxes(stored[columns.boxes])
        if columns.boxes in given:
            stored[columns.boxes] = boxes
        bad = find_bad_boxes(boxes, view.width, view.height)
        if bad and config.on_bad != "drop":
            (found.bad if config.on_bad == "mask" else found.raised)[index] = "; ".join(bad.values())
        found.num_bad_boxes += len(bad) if config.on_bad == "drop" else 0
        objects["boxes"], numbers = map_boxes(boxes, view, config)
    if has_mask is not None and masks is not None:
        if len(has_mask) < len(numbers):
            raise BadSampleError("has objects, and its list of polygons is null: it was ingested without polygons")
        # A model would learn from an object without a mask that it has no pixel.
        is_kept = has_mask[numbers]
        numbers = numbers[is_kept]
        objects = {name: values[is_kept] for name, values in objects.items()}
        objects["masks"] = masks[(np.cumsum(has_mask) - 1)[numbers]]
    if columns.keypoints is not None:
        keypoints = read_keypoints(stored[columns.keypoints], columns.num_keypoints)
        if columns.keypoints in given:
            stored[columns.keypoints] = keypoints
        if len(keypoints) < len(numbers):
            raise BadSampleError("its list of keypoints is null, and its other lists have objects")
        objects["keypoints"] = map_keypoints(keypoints[numbers], view, config.flip_pairs or ())
    for name, dtype in columns.values.items():
        values = stored[name] if stored[name] is not None else []
        if len(values) < len(numbers) or None in values:
            raise BadSampleError(f"its list {name!r} lacks the value of an object")
        objects[name] = np.array(values, dtype)[numbers]
    objects["numbers"] = numbers
    return objects

"""Export format of COCO: unchanged images as `SPLIT/KEY.jpg`, and their boxes in `annotations/instances_SPLIT.json`.

The ids of categories are labels plus 1, since evaluations of COCO take 0 for no category. Images are numbered from 1,
in the order of the split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final

from datasvc.errors import ConfigError
from datasvc.shards.export.destination import Destination, image_extension, safe_part, safe_path, split_extension
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    check_images,
    encode_json,
    given_columns,
    refused_column,
    refused_null,
    samples_of,
)
from datasvc.shards.export.records import unit_path
from datasvc.shards.format.schema import (
    BOX_CLASSES,
    BOX_LABELS,
    BOXES,
    HEIGHT,
    IMAGE,
    KEY,
    KEYPOINTS,
    MASK_RUNS,
    POLYGONS,
    WIDTH,
    is_list,
    parse_box_classes,
)
from datasvc.shards.versions.dataset import Split

_CROWD, _AREA = "box_crowd", "box_area"
_LISTS: Final = (BOXES, BOX_LABELS, _CROWD, _AREA, KEYPOINTS, POLYGONS, MASK_RUNS)
_COLUMNS: Final = frozenset({KEY, IMAGE, WIDTH, HEIGHT, *_LISTS})
_SUPPORTED_BY: Final = "parquet, webdataset"
_WRITING_THREADS: Final = 16
_DIGITS: Final = 6  # of widths, which are differences of stored numbers


class CocoExport(ExportFormat):
    """Writes images, and a JSON file per split; see the module docstring."""

    name: ClassVar[str] = "coco"

    def check(self, split: Split) -> None:
        """Raise ConfigError if there are no images or boxes, or for columns that COCO does not have."""
        check_images(self.name, split)
        schema = split.table.sample_schema
        for column in given_columns(schema):
            if column.name not in _COLUMNS:
                raise refused_column(self.name, column, _SUPPORTED_BY)
        for name in (BOXES, BOX_LABELS):
            if name not in schema.names or not is_list(schema.field(name).type):
                raise ConfigError(f"coco holds boxes, but {split} has no lists {name!r}; export it as folder")

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the images of a unit, and their annotations for `join`. For errors, see `ExportFormat.write`."""
        folder = safe_part(unit.split.name)
        lines: list[bytes] = []
        size_bytes = 0
        with ThreadPoolExecutor(_WRITING_THREADS, thread_name_prefix="datasvc-export") as pool:
            for batch in unit.batches():
                samples = list(samples_of(batch))
                names = [_file_name(sample) for sample in samples]
                paths = [f"{folder}/{name}" for name in names]
                size_bytes += sum(pool.map(destination.put, paths, [sample[IMAGE] for sample in samples]))
                for sample, name in zip(samples, names, strict=True):
                    entry = {"file_name": name, "width": sample[WIDTH], "height": sample[HEIGHT]}
                    lines.append(encode_json([entry, _objects(sample)], sample[KEY]) + b"\n")
        destination.put(unit_path(unit.split.name, unit.number, "jsonl"), b"".join(lines))
        return WrittenFiles(len(lines), len(lines), size_bytes)

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write the JSON file of a split. Raises ConfigError: two samples have one file name, or a label no class."""
        classes = parse_box_classes((split.table.sample_schema.metadata or {}).get(BOX_CLASSES))
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        num_labels = len(classes)
        for number in range(len(written)):
            for line in destination.storage.read(unit_path(split.name, number, "jsonl")).splitlines():
                image, objects = json.loads(line)
                images.append({"id": len(images) + 1, **image})
                for each in objects:
                    num_labels = max(num_labels, each["category_id"])
                    annotations.append({"id": len(annotations) + 1, "image_id": len(images), **each})
        if classes and num_labels > len(classes):
            raise ConfigError(
                f"coco cannot hold the label {num_labels - 1} of {split}: it has {len(classes)} classes"
            )
        if len({image["file_name"] for image in images}) < len(images):
            raise ConfigError(f"coco cannot hold {split}: two samples would have one file name; export it as parquet")
        names = classes or [str(label) for label in range(num_labels)]
        keypoints = _named_keypoints(annotations)
        document = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": number, "name": name, **keypoints} for number, name in enumerate(names, 1)],
        }
        name = f"annotations/instances_{safe_part(split.name)}.json"
        return WrittenFiles(0, 1, destination.put(name, json.dumps(document, ensure_ascii=False).encode()))


def _named_keypoints(annotations: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return names of keypoints, by which a reader knows their number; {} if there are none."""
    count = max((len(annotation.get(KEYPOINTS, ())) // 3 for annotation in annotations), default=0)
    return {KEYPOINTS: [str(number) for number in range(count)]} if count else {}


def _file_name(sample: Mapping[str, Any]) -> str:
    if sample[IMAGE] is None:
        raise refused_null("coco", IMAGE, sample[KEY], _SUPPORTED_BY)
    extension = image_extension(sample[IMAGE])
    stem, key_extension = split_extension(sample[KEY], extension)
    return f"{safe_path(stem)}.{key_extension or extension}" if extension else safe_path(stem)


def _objects(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the annotations of a sample without ids. Raise ConfigError: its lists have different lengths."""
    found = []
    columns = [sample.get(name) or [] for name in _LISTS]
    boxes, labels, crowds, areas, keypoints, polygons, runs = columns
    if any(len(column) != len(boxes) for column in columns[1:] if column) or len(labels) != len(boxes):
        raise ConfigError(f"coco cannot hold sample {sample[KEY]!r}: its lists of boxes and values differ in length")
    for number, ((left, top, right, bottom), label) in enumerate(zip(boxes, labels, strict=True)):
        width, height = round(right - left, _DIGITS), round(bottom - top, _DIGITS)
        entry = {"category_id": label + 1, "bbox": [left, top, width, height]}
        entry["area"] = areas[number] if areas else width * height
        entry["iscrowd"] = int(crowds[number]) if crowds else 0
        if polygons and polygons[number]:  # readers cannot draw an object without
            entry["segmentation"] = polygons[number]
        elif runs and runs[number]:
            entry["segmentation"] = {"size": [sample[HEIGHT], sample[WIDTH]], "counts": runs[number]}
        if keypoints:
            points = keypoints[number]
            flat = (
                [value for point in points for value in point] if points and isinstance(points[0], list) else points
            )
            entry |= {KEYPOINTS: flat, "num_keypoints": sum(value > 0 for value in flat[2::3])}
        found.append(entry)
    return found

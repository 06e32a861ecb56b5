"""Source of COCO: images, and JSON files of images, annotations and categories, such as `instances_train2017.json`.

Labels are the categories in the order of their ids, from 0: the ids of COCO itself have gaps.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.schema import KEYPOINTS, MASK_RUNS, POLYGONS
from datasvc.shards.images.run_lengths import parse_runs
from datasvc.shards.sources.common.options import SPLIT_NAMES, SourceOptions, split_of
from datasvc.shards.sources.common.source import ListedFile
from datasvc.shards.sources.images.annotated import (
    BOX_AREA,
    BOX_COLUMNS,
    AnnotatedFolder,
    AnnotatedSource,
    Annotation,
    check_missing,
    require,
)

BOX_CROWD: Final = "box_crowd"
# COCO's own training annotations have 470 MB; parsed, JSON takes about ten times its size.
_MAX_BYTES: Final = 2 << 30
# COCO's own folder has up to four files for the images of a split, and all boxes are in `instances`.
_OTHER_FILE: Final = re.compile(r"(captions|panoptic|person_keypoints)_(?=[^/]*$)")
_HEAD_BYTES: Final = 1 << 20  # a smaller file without these words is no COCO file


@dataclass(frozen=True)
class CocoSource(AnnotatedSource):
    """Images with boxes; polygons and run lengths, if there are some; keypoints, if categories have equally many."""

    kind: ClassVar[str] = "coco"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> CocoSource:
        """List the source: each JSON file that lists images and annotations. Its name or folder gives the split.

        Images are searched beside the file, below the root, and below `images` and the last word of the file's name,
        such as `train2017`, in each of these.

        Raises:
            NotFoundError: there is no such JSON file, or an image that it lists is missing.
            ConfigError: a file is damaged, a category has no name, files have different categories, or a split lists
                an image twice.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        folder = AnnotatedFolder.find(url)
        names = [name for name in folder.names(".json") if _instances_of(name) not in folder.files.keys() - {name}]
        parsed = {name: _parse(folder, name) for name in names}
        documents = {name: document for name, document in parsed.items() if document is not None}
        require([*documents], url, "JSON file with images, boxes and categories")
        categories = _categories(documents, url)
        labels = {category["id"]: label for label, category in enumerate(categories)}
        counts = {len(category["keypoints"]) for category in categories if category.get("keypoints")}
        num_keypoints = counts.pop() if len(counts) == 1 else 0
        columns = {**BOX_COLUMNS, BOX_CROWD: pa.bool_(), BOX_AREA: pa.float64()}
        if num_keypoints:
            columns[KEYPOINTS] = pa.list_(pa.float64(), 3 * num_keypoints)
        rows = [row.get("segmentation") for document in documents.values() for row in document["annotations"]]
        if any(rows):
            columns[POLYGONS] = pa.list_(pa.list_(pa.float64()))
        if any(isinstance(row, dict) for row in rows):
            columns[MASK_RUNS] = pa.list_(pa.int32())
        splits: defaultdict[str, list[ListedFile]] = defaultdict(list)
        listed: dict[tuple[str, str], str] = {}
        for name, document in documents.items():
            split = options.split or split_of(name)
            for found, key, image, objects in _images(folder, name, document, url):
                if (other := listed.get((split, found))) is not None:
                    raise ConfigError(
                        f"image {found} is listed twice for the split {split}, by {other} and {name}; remove one "
                        "entry, or move one of these files out of the source"
                    )
                listed[split, found] = name
                annotation = _annotate(image, objects, labels, num_keypoints, columns)
                splits[split].append(folder.image(found, key, annotation))
        return cls.of(url, [category["name"] for category in categories], columns, splits, folder.ignored())


def _instances_of(name: str) -> str:
    """Return the name of the file with all boxes of the images of another file of COCO."""
    return _OTHER_FILE.sub("instances_", name)


def _parse(folder: AnnotatedFolder, name: str) -> dict[str, Any] | None:
    """Return a COCO document; None if the file is something else. Raises ConfigError: it is damaged."""
    content = folder.text(name, limit_bytes=_MAX_BYTES)
    if len(content) < _HEAD_BYTES and b'"annotations"' not in content:
        folder.used.discard(name)
        return None
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}; restore it, or move it out of the source") from error
    rows = document.get("annotations") if isinstance(document, dict) and "images" in document else None
    # Captions, and masks without boxes, are in files of the same form.
    if not isinstance(rows, list) or (rows and not any("bbox" in row for row in rows if isinstance(row, dict))):
        folder.used.discard(name)
        return None
    for part in ("images", "annotations", "categories"):
        rows = document.get(part, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"{name} has no valid list {part!r}; expected the format of COCO's instances.json")
    return cast("dict[str, Any]", document)


def _categories(documents: Mapping[str, Any], url: str) -> list[dict[str, Any]]:
    """Return the categories of all documents, ordered by id. Raises ConfigError: one has no name, or they differ."""
    found: dict[int, dict[str, Any]] = {}
    for name, document in documents.items():
        for category in document.get("categories", []):
            number, called = category.get("id"), category.get("name")
            if not isinstance(number, int) or not isinstance(called, str) or not called:
                raise ConfigError(f"{name} has a category without a name or an id: {category}; give it one")
            if found.setdefault(number, category)["name"] != called:
                raise ConfigError(
                    f"category {number} of {redact_url(url)} is {found[number]['name']!r} in one file and {called!r} "
                    f"in {name}; ingest the files as separate data sets"
                )
    return [found[number] for number in sorted(found)]


def _images(
    folder: AnnotatedFolder, name: str, document: Mapping[str, Any], url: str
) -> list[tuple[str, str, dict[str, Any], list[dict[str, Any]]]]:
    """Return each image of a document: its file, key, entry and annotations."""
    by_image: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for annotation in document["annotations"]:
        by_image[str(annotation.get("image_id"))].append(annotation)
    beside = name.rpartition("/")[0]
    word = name.rpartition("/")[2].removesuffix(".json").rpartition("_")[2]
    folders = [f"{base}/{part}".strip("/") for base in (beside, "", "images") for part in ("", word, "images")]
    found, missing = [], []
    for image in document["images"]:
        file_name = image.get("file_name")
        if not isinstance(file_name, str) or ".." in file_name.split("/"):
            raise ConfigError(
                f"{name} lists an image with the file name {file_name!r}; expected a path below the source"
            )
        places = (f"{place}/{file_name}".lstrip("/") for place in folders)
        place = next((place for place in places if place in folder.files), None)
        if place is None:
            missing.append(file_name)
            continue
        top, _, rest = file_name.partition("/")
        key = rest if rest and top.lower() in SPLIT_NAMES else file_name
        found.append((place, key, image, by_image[str(image.get("id"))]))
    check_missing(missing, len(document["images"]), url)
    return found


def _annotate(
    image: Mapping[str, Any],
    objects: Sequence[Mapping[str, Any]],
    labels: Mapping[Any, int],
    num_keypoints: int,
    names: Collection[str],
) -> Annotation:
    """Return the objects of an image: `names` are its columns. What cannot be read makes the image a bad sample."""
    boxes: list[list[float]] = []
    columns: tuple[list[Any], ...] = tuple([] for _ in names)
    size = (image.get("width"), image.get("height"))
    if not all(isinstance(side, int) and side > 0 for side in size):
        return Annotation([], columns, None, f"its entry has the width and height {size}; expected pixels")
    for annotation in objects:
        number = annotation.get("id")
        try:
            left, top, width, height = map(float, annotation["bbox"])
            label = labels[annotation["category_id"]]
            points = [float(value) for value in annotation.get("keypoints") or [0.0] * 3 * num_keypoints]
            segmentation = annotation.get("segmentation")
            polygons = _polygons(segmentation)
            runs = _runs(segmentation, *size) if isinstance(segmentation, dict) else None
        except (KeyError, TypeError, ValueError, OverflowError):
            reason = f"its annotation {number} has no valid bbox, category, keypoints, polygons or run lengths"
            return Annotation([], columns, None, reason)
        if num_keypoints and len(points) != 3 * num_keypoints:
            return Annotation([], columns, None, f"its annotation {number} has {len(points)} numbers of keypoints")
        boxes.append([left, top, left + width, top + height])
        area = annotation.get("area")
        area = float(area) if isinstance(area, int | float) else width * height
        further = [points] if num_keypoints else []
        values = (label, bool(annotation.get("iscrowd")), area, *further, polygons, runs)
        for column, value in zip(columns, values, strict=False):  # without polygons, there are no columns for them
            column.append(value)
    return Annotation(boxes, columns, (int(size[0] or 1), int(size[1] or 1)))


def _runs(segmentation: Mapping[str, Any], width: Any, height: Any) -> tuple[list[int], int, int]:
    """Return the run lengths of an object, and width and height of their mask.

    Raises ValueError: the mask has another shape than the image. Of another size, it shows the whole image.
    """
    runs, across, down = parse_runs(segmentation)
    if abs(across * height - down * width) > max(across, down, width, height):
        raise ValueError(f"run lengths are of {across}x{down} pixels, and the image has {width}x{height}")
    return runs, across, down


def _polygons(segmentation: Any) -> list[list[float]]:
    """Return the polygons of an object that have an area; [] if it has run lengths, see `_runs`. Raises ValueError.

    A list of numbers is one polygon.
    """
    if not isinstance(segmentation, list):
        return []
    listed = segmentation if any(isinstance(polygon, list) for polygon in segmentation) else [segmentation]
    polygons = [list(map(float, polygon)) for polygon in listed]
    if any(len(polygon) % 2 for polygon in polygons):
        raise ValueError("a polygon is no list of x and y")
    return [polygon for polygon in polygons if len(polygon) >= 6]

"""Source of YOLO: `images/train/a.jpg` with the text file `labels/train/a.txt`, and a list of the classes.

A file has a line per object: the number of its class, and centre, width and height as fractions of the image. More
numbers are a polygon, which also gives the box.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.schema import POLYGONS
from datasvc.shards.sources.common.options import SPLIT_NAMES, SourceOptions, split_of
from datasvc.shards.sources.common.source import ListedFile
from datasvc.shards.sources.images.annotated import BOX_COLUMNS, AnnotatedFolder, AnnotatedSource, Annotation, require

_NAME_LISTS: Final = ("classes.txt", "obj.names")


@dataclass(frozen=True)
class YoloSource(AnnotatedSource):
    """Images with boxes. An image without a text file has no objects, as in YOLO itself."""

    kind: ClassVar[str] = "yolo"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> YoloSource:
        """List the source. The classes are those of its YAML file, of `classes.txt` or of `obj.names`.

        Raises:
            NotFoundError: there are no images, or no names of the classes.
            ConfigError: the names cannot be read.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        folder = AnnotatedFolder.find(url)
        names = _names(folder, url)
        labels = {image: label for image in folder.names() if (label := _label_file(image)) in folder.files}
        require(
            [*labels.values()], url, "text files with the boxes of its images: labels/NAME.txt for images/NAME.jpg"
        )
        texts = dict(zip(labels, folder.texts([*labels.values()]), strict=True))
        annotations = {image: _annotate(texts.get(image, b""), len(names)) for image in folder.names()}
        columns = dict(BOX_COLUMNS)
        if any(any(annotation.values[1]) for annotation in annotations.values()):
            columns[POLYGONS] = pa.list_(pa.list_(pa.float64()))
        splits: defaultdict[str, list[ListedFile]] = defaultdict(list)
        for image, annotation in annotations.items():
            split = options.split or split_of(image)
            kept = annotation._replace(values=annotation.values[: len(columns)])
            splits[split].append(folder.image(image, _key(image), kept))
        return cls.of(url, names, columns, splits, folder.ignored())


def _label_file(image: str) -> str:
    """Return the text file of an image: `images` in its path is replaced by `labels`, from the right."""
    folders = image.split("/")
    for index in range(len(folders) - 2, -1, -1):
        if folders[index] == "images":
            folders[index] = "labels"
            break
    return "/".join(folders).rpartition(".")[0] + ".txt"


def _key(image: str) -> str:
    """Return the path of an image without the folder `images` and that of its split."""
    *folders, name = image.split("/")
    return "/".join([each for each in folders if each != "images" and each.lower() not in SPLIT_NAMES] + [name])


def _names(folder: AnnotatedFolder, url: str) -> list[str]:
    """Return the names of the classes by label. Raises ConfigError: the file is damaged."""
    settings = folder.names(".yaml", ".yml")
    lists = [name for name in folder.files if name.rpartition("/")[2] in _NAME_LISTS]
    require([*settings, *lists], url, "names of classes: expected data.yaml, classes.txt or obj.names")
    for name in settings:
        names = _yaml_names(folder.text(name), name)
        if names:
            return names
        folder.used.discard(name)
    if not lists:
        raise ConfigError(f"the YAML files of {redact_url(url)} have no field 'names'; add the names of the classes")
    try:
        return [line.strip() for line in folder.text(lists[0]).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{lists[0]} is not UTF-8: {error}") from error


def _yaml_names(content: bytes, name: str) -> list[str] | None:
    """Return the names in a YAML file; None if it has none."""
    with explain_missing("a YOLO source with a YAML file (classes.txt needs none)"):
        import yaml  # type: ignore[import-untyped]
    try:
        # Aliases are refused: a few lines of them make a list of billions.
        tokens = yaml.scan(content, Loader=yaml.SafeLoader)
        if any(isinstance(token, yaml.AliasToken) for token in tokens):
            raise ConfigError(f"{name} has aliases; write the names of the classes out")
        document = yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from error
    names: Any = document.get("names") if isinstance(document, dict) else None
    if isinstance(names, dict):
        if sorted(names) != list(range(len(names))):
            raise ConfigError(f"the names of {name} have the numbers {[*names][:10]}; expected 0, 1, 2 and so on")
        names = [names[number] for number in range(len(names))]
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(each, str | int) and str(each) for each in names):
        raise ConfigError(f"the names of {name} are {names!r}; expected a list of names")
    return [str(each) for each in names]


def _annotate(text: bytes, num_classes: int) -> Annotation:
    """Return the objects of a text file, as fractions. A line that cannot be read makes the image a bad sample."""
    boxes: list[list[float]] = []
    labels: list[int] = []
    polygons: list[list[list[float]]] = []
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *places = map(float, line.split())
        except ValueError:
            places = []
        if len(places) < 4 or len(places) == 5 or len(places) % 2:
            return Annotation(
                [], ([], []), None, f"line {number} of its labels is {line[:60]!r}; expected class x y w h"
            )
        if not 0 <= label < num_classes or not label.is_integer():
            return Annotation(
                [], ([], []), None, f"line {number} of its labels has the class {label:g} of {num_classes}"
            )
        if len(places) == 4:
            x, y, width, height = places
            boxes.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
            polygons.append([])
        else:
            boxes.append([min(places[::2]), min(places[1::2]), max(places[::2]), max(places[1::2])])
            polygons.append([places])
        # A label of YOLO in pixels is a common mistake, and no box of an image is that far outside of it.
        if not all(-1 <= each <= 2 for each in boxes[-1] if math.isfinite(each)):
            return Annotation(
                [], ([], []), None, f"line {number} of its labels is in pixels; expected fractions, 0 to 1"
            )
        labels.append(int(label))
    return Annotation(boxes, (labels, polygons))

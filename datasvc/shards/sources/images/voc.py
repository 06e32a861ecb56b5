"""Source of Pascal VOC: `Annotations/a.xml` for `JPEGImages/a.jpg`, and splits in `ImageSets/Main/train.txt`.

The pixels of VOC are numbered from 1, and a box includes its last one, so `xmin` and `ymin` are stored less 1.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from xml.etree import ElementTree as ET

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, SPLIT_NAMES, SourceOptions
from datasvc.shards.sources.common.source import ListedFile
from datasvc.shards.sources.images.annotated import (
    BOX_COLUMNS,
    AnnotatedFolder,
    AnnotatedSource,
    Annotation,
    check_missing,
    require,
)

BOX_DIFFICULT: Final = "box_difficult"
_SETS: Final = "ImageSets/Main/"


@dataclass(frozen=True)
class VocSource(AnnotatedSource):
    """Images with boxes. The classes are all names of its objects, sorted."""

    kind: ClassVar[str] = "voc"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> VocSource:
        """List the source.

        Raises:
            NotFoundError: there is no XML file, or an image that one names is missing.
            ConfigError: two images have the same name, or an image is in two splits.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        folder = AnnotatedFolder.find(url)
        files = folder.names(".xml")
        require(files, url, "XML file with the boxes of an image")
        images: dict[str, str] = {}
        for name in folder.names():
            stem = posixpath.splitext(posixpath.basename(name))[0]
            if images.setdefault(stem, name) != name:
                raise ConfigError(f"two images have the name {stem}: {images[stem]} and {name}; rename one of them")
        splits_of = _splits(folder)
        parsed = [_parse(content) for content in folder.texts(files)]
        names = sorted({name for objects, _, _ in parsed for name, _, _ in objects})
        labels = {name: label for label, name in enumerate(names)}
        splits: defaultdict[str, list[ListedFile]] = defaultdict(list)
        missing = []
        for file, (objects, size, reason) in zip(files, parsed, strict=True):
            stem = posixpath.splitext(posixpath.basename(file))[0]
            if stem not in images:
                missing.append(stem)
                continue
            split = options.split or splits_of.get(stem, DEFAULT_SPLIT if not splits_of else None)
            if split is None:
                continue  # in none of the lists; its image is counted as not used
            columns = [labels[name] for name, _, _ in objects], [difficult for _, difficult, _ in objects]
            annotation = Annotation([box for _, _, box in objects], columns, size, reason)
            splits[split].append(folder.image(images[stem], posixpath.basename(images[stem]), annotation))
        check_missing(missing, len(files), url)
        return cls.of(url, names, {**BOX_COLUMNS, BOX_DIFFICULT: pa.bool_()}, splits, folder.ignored())


def _splits(folder: AnnotatedFolder) -> dict[str, str]:
    """Return the split of each image by its name. Raises ConfigError: an image is in two."""
    found: dict[str, str] = {}
    for name in folder.names(".txt"):
        split = posixpath.splitext(posixpath.basename(name))[0].lower()
        # Other lists are of one class each, or, as `trainval`, of several splits together.
        if _SETS not in f"/{name}" or split not in SPLIT_NAMES:
            continue
        for line in folder.text(name).decode("utf-8", "replace").splitlines():
            stem = line.split()[0] if line.split() else ""
            if stem and found.setdefault(stem, split) != split:
                raise ConfigError(f"image {stem} is in the lists of {found[stem]} and {split}; remove it from one")
    return found


class _Tree(ET.TreeBuilder):
    """Builds a tree of XML without a document type, whose entities could expand to gigabytes."""

    def doctype(self, *_: Any) -> None:
        raise ValueError("it has a document type, which is not read")


def _parse(content: bytes) -> tuple[Sequence[tuple[str, bool, list[float]]], tuple[int, int] | None, str]:
    """Return the objects of an XML file (name, difficult, box), the size of its image, and why it is bad, or ""."""
    try:
        parser = ET.XMLParser(target=_Tree())  # noqa: S314 - without a document type, nothing expands
        root = ET.fromstring(content, parser=parser)  # noqa: S314
        size = tuple(int(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        objects = [_parse_object(each) for each in root.findall("object")]
    except (ET.ParseError, RecursionError, ValueError, OverflowError, LookupError) as error:
        return [], None, f"its XML file cannot be read: {error}"
    # Some tools write a size of 0; then the size to which the pixels of the boxes refer is unknown.
    return objects, (size[0], size[1]) if min(size) > 0 else None, "" if min(size) > 0 else "its XML file has no size"


def _parse_object(element: ET.Element) -> tuple[str, bool, list[float]]:
    name = (element.findtext("name") or "").strip()
    if not name:
        raise ValueError("an object has no name")
    places = [float(element.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")]
    return name, element.findtext("difficult", "0").strip() == "1", [places[0] - 1, places[1] - 1, *places[2:]]

"""Source of ImageNet as distributed: a tar of class tars for training, a tar of images for validation.

The tars are not extracted. The listing reads only the headers of the training tar: some 1,000 small sequential reads,
which are slow on a remote store. Each class tar is a part: its range of bytes is known, so classes can be read in
parallel and mixed. Images are kept unchanged, including the PNG and CMYK ones.

A synset is the name of a class, such as n01440764. The classes are in alphabetical order of the synsets, as is usual
for class folders; a label is an index in this order. The synset list of the devkit, the development kit of the tars,
has another order: the ILSVRC id of a synset is its line number there, from 1. Line i of the ground truth is the
ILSVRC id of validation image i.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Final, cast

import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, image_field
from datasvc.shards.images.header import EXTENSIONS
from datasvc.shards.sources.common.columns import to_batches
from datasvc.shards.sources.common.file_checks import hidden_part
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, FileSource, SourcePart
from datasvc.shards.sources.tar.tar import MAX_MEMBER_BYTES, TarMember, TarReader, open_tar

_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_VAL_IMAGE: Final = re.compile(r".*_val_(\d{8})\.jpe?g", re.IGNORECASE)


SYNSET: Final = re.compile(r"n\d{8}")

_DEVKIT: Final = "ILSVRC2012_devkit_t12/data"
_GROUND_TRUTH: Final = "ILSVRC2012_validation_ground_truth.txt"
_SYNSETS: Final = ("synsets.txt", "synset_words.txt", "LOC_synset_mapping.txt")
_NUM_CLASSES: Final = 1000
_HOW_TO_LIST: Final = (
    "write the list from the devkit's meta.mat: python -c \"import scipy.io; print('\\n'.join(s[0][1][0] for s in "
    "scipy.io.loadmat('meta.mat')['synsets'][:1000]))\" > synsets.txt"
)


@dataclass(frozen=True, kw_only=True)
class ImageNetSource(FileSource):
    """The source of ImageNet's tars.

    The parts are the class tars by name, then the validation tar; the classes are the synsets in alphabetical order.

    Attributes:
        val_labels: labels of the validation images, in the order of their numbers.
    """

    kind: ClassVar[str] = "imagenet"

    val_labels: tuple[int, ...] = ()

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ImageNetSource:
        """List the source from the headers of the training tar and the labels of the validation images.

        For other errors, see `FileSource.list`.

        Raises:
            ConfigError: ground truth, synsets and training tar contradict each other.
        """
        options = options or SourceOptions()
        reader = FileReader(url)
        folder, tars = _find_tars(url, reader)
        parts: list[SourcePart] = []
        classes: tuple[str, ...] = ()
        val_labels: tuple[int, ...] = ()
        ignored: Counter[str] = Counter()
        for tar in tars:
            if _holds_images(reader, tar):  # the validation tar
                synsets = read_synsets(folder, reader, options)
                ground_truth = read_ground_truth(folder, reader, options)
                # If there is a training tar, it has set `classes`, and `labels_of` checks them against the synsets.
                classes = classes or tuple(sorted(synsets))
                val_labels = tuple(labels_of(ground_truth, synsets, classes))
                # The stamp shows whether samples may have changed. It includes the labels, which another ground truth
                # changes.
                stamp = f"{tar.stamp} {digest_of(repr(val_labels).encode())}"
                split, size_bytes, count = options.split or "val", tar.size_bytes, len(val_labels)
                parts.append(SourcePart(split, tar.name, size_bytes, count, stamp, {"path": tar.path}))
            else:
                class_tars = _class_tars(reader, tar, ignored)
                classes = tuple(sorted(class_tars))
                for label, name in enumerate(classes):
                    # `where` locates the class tar inside the training tar, so nothing is extracted or copied.
                    member, split = class_tars[name], options.split or "train"
                    size, path = member.size_bytes, f"{tar.name}/{member.name}"
                    where = {"path": tar.path, "offset": member.offset, "length": size, "label": label}
                    parts.append(SourcePart(split, path, size, stamp=tar.stamp, where=where))
        key, label_field = (pa.field(KEY, pa.string(), nullable=False), pa.field(LABEL, pa.int32(), nullable=False))
        schema = pa.schema([key, image_field(IMAGE), label_field])
        return cls(url=url, schema=schema, parts=parts, classes=classes, val_labels=val_labels, ignored=ignored)

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the images of a class tar, or of the validation tar; see `StreamedSource.read`.

        Raises:
            ConfigError: the ground truth has no line for a validation image.
        """
        label: int | None = part.where.get("label")  # None for the validation tar
        with _open_part(FileReader(self.url), part) as stream:
            tar = TarReader(stream, f"{redact_url(self.url)}: {part.name}")

            def to_sample(key: str, member: TarMember) -> dict[str, Any]:
                _check_image(member)  # before the read, so that a member that is too large is never held in memory
                known_label = self._val_label(key) if label is None else label
                return {KEY: key, IMAGE: tar.read(member), LABEL: known_label}

            yield from to_batches(self.schema, part, self._members(tar, part, label), to_sample)

    def _members(
        self, tar: TarReader, part: SourcePart, label: int | None
    ) -> Iterator[tuple[str, TarMember | BadSampleError]]:
        """Yield key and member of each image; at the end, an error if the validation tar has too few images."""
        num_images = 0
        for member in tar:
            name = member.name.rpartition("/")[2]
            if hidden_part(member.name) is None:
                num_images += 1
                yield name if label is None else f"{self.classes[label]}/{name}", member
        if label is None and num_images < len(self.val_labels):
            reason = (
                f"holds {count_text(num_images, 'image')}, but the ground truth has "
                f"{count_text(len(self.val_labels), 'line')}"
            )
            yield part.name, BadSampleError(reason)

    def _val_label(self, name: str) -> int:
        """Return the label of the validation image `name`."""
        match = _VAL_IMAGE.fullmatch(name)
        if match is None or int(match[1]) == 0:
            raise BadSampleError("its name has no image number; expected a name like ILSVRC2012_val_00000001.JPEG")
        if int(match[1]) > len(self.val_labels):
            raise ConfigError(
                f"{name} is validation image {int(match[1])}, but the ground truth has "
                f"{count_text(len(self.val_labels), 'line')}; "
                "use the ground truth that belongs to this tar"
            )
        return self.val_labels[int(match[1]) - 1]


class _HeaderFile:
    """A file that sends one range request per read; it has only the stream methods that `TarReader` uses."""

    def __init__(self, reader: FileReader, file: SourceFile) -> None:
        self._reader, self._file, self._offset = reader, file, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int) -> int:
        assert whence == io.SEEK_CUR
        self._offset += offset
        return self._offset

    def read(self, length: int) -> bytes:
        # Request no range at the end of the file, because a store refuses an empty range.
        length = max(0, min(length, self._file.size_bytes - self._offset))
        content = self._reader.read_range(self._file.path, self._offset, length) if length else b""
        self._offset += len(content)
        return content


def _find_tars(url: str, reader: FileReader) -> tuple[str, list[SourceFile]]:
    """Return the folder of the tars, and the tars that exist, training first. Raise NotFoundError if none exists."""
    with map_exceptions("open", redact_url(url)):
        is_folder = reader.file_system.isdir(reader.root)
    if not is_folder:
        return reader.root.rpartition("/")[0], list_files(url)
    tars: list[SourceFile] = []
    for name in (_TRAIN_TAR, _VAL_TAR):
        # Do not list the folder: it may also hold a million extracted images.
        try:
            tars += list_files(f"{url.rstrip('/')}/{name}")
        except NotFoundError:
            continue  # one of the two is enough
    if not tars:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: expected {_TRAIN_TAR} or {_VAL_TAR} in it")
    return reader.root, tars


def _holds_images(reader: FileReader, tar: SourceFile) -> bool:
    """Return true if a tar starts with an image, false for a class tar. Raise CorruptDataError for anything else."""
    first = next(iter(_walk(reader, tar)), None)
    if first is None or _extension(first.name) not in {".tar", *EXTENSIONS}:
        raise CorruptDataError(
            f"{reader.location(tar.path)} starts with {first.name if first else 'nothing'!r}; expected a class tar, "
            "such as n01440764.tar, or an image"
        )
    return _extension(first.name) != ".tar"


def _class_tars(reader: FileReader, tar: SourceFile, ignored: Counter[str]) -> dict[str, TarMember]:
    """Return the class tars in the training tar by synset; count the other members in `ignored`."""
    by_synset: dict[str, TarMember] = {}
    for member in _walk(reader, tar):
        base, extension = member.name.rpartition("/")[2], _extension(member.name)
        synset = base[: -len(extension)] if extension else base
        if extension != ".tar" or hidden_part(member.name) is not None:
            ignored[extension or "(none)"] += 1
            continue
        if member.problem is not None or not SYNSET.fullmatch(synset):
            problem = member.problem or "is not named after a synset, such as n01440764.tar"
            raise ConfigError(f"cannot ingest {reader.location(tar.path)}: its member {member.name} {problem}")
        if synset in by_synset:
            raise ConfigError(f"cannot ingest {reader.location(tar.path)}: it has the class {synset} twice")
        by_synset[synset] = member
    return by_synset


def _walk(reader: FileReader, tar: SourceFile) -> TarReader:
    """Return an iterator over the members of a tar; it reads only their headers."""
    return TarReader(cast("BinaryIO", _HeaderFile(reader, tar)), reader.location(tar.path))


def _open_part(reader: FileReader, part: SourcePart) -> BinaryIO:
    """Open the tar of a part as a stream: a range of the training tar, or the validation tar."""
    if "offset" not in part.where:
        return open_tar(reader, part.where["path"])
    start = part.where["offset"]
    return open_tar(reader, part.where["path"], start=start, stop=start + part.where["length"])


def _check_image(member: TarMember) -> None:
    """Raise BadSampleError if a member cannot be a sample; `problem` is what `TarReader` found wrong with it."""
    if member.problem is not None:
        raise BadSampleError(f"{member.name} {member.problem}")
    if _extension(member.name) not in EXTENSIONS:
        raise BadSampleError(f"{member.name} has no image extension")
    if member.size_bytes > MAX_MEMBER_BYTES:
        raise BadSampleError(f"{member.name} has {member.size_bytes} bytes; expected at most {MAX_MEMBER_BYTES}")


def _extension(name: str) -> str:
    base = name.rpartition("/")[2]
    return f".{base.rpartition('.')[2].lower()}" if "." in base else ""


# A synset is the name of a class, such as n01440764; the devkit is the development kit that ImageNet distributes with
# its tars. `ImageNetSource` orders the classes alphabetically by synset, as is usual for class folders; a label is an
# index in this order. The synset list of the devkit has another order. The ILSVRC id of a synset is its line number
# in that list, from 1. Line i of the ground truth is the ILSVRC id of image i.


def read_synsets(folder: str, reader: FileReader, options: SourceOptions) -> list[str]:
    """Return the synsets in the order of the ILSVRC ids, from the file in `options` or in `folder`, that of the tars.

    The synset is the first word of a line. Only the first 1,000 lines, the classes, are used; the lines after them
    list the inner nodes of the hierarchy of synsets.

    Raises:
        NotFoundError: there is no such file; the message tells how to get one.
        ConfigError: the list is empty or in alphabetical order, or a line is not a synset or repeats one.
    """
    advice = f"--synsets, a list of synsets; {_HOW_TO_LIST}"
    location, text = _read_text(options.synsets, folder, reader, _SYNSETS, advice)
    # An empty line gives "", which is refused below with its line number.
    synsets = [(line.split() or [""])[0] for line in text.rstrip().splitlines()][:_NUM_CLASSES]
    numbers: dict[str, int] = {}
    for number, synset in enumerate(synsets, 1):
        if not SYNSET.fullmatch(synset):
            raise ConfigError(f"line {number} of {location} starts with {synset!r}; expected a synset like n01440764")
        if synset in numbers:
            raise ConfigError(f"{location} has {synset} twice, in lines {numbers[synset]} and {number}")
        numbers[synset] = number
    if not synsets:
        raise ConfigError(f"{location} is empty; expected one synset per line, such as n01440764")
    # Caffe and Kaggle distribute alphabetical lists. With these, the devkit's ids would give wrong labels.
    if len(synsets) == _NUM_CLASSES and synsets == sorted(synsets):
        raise ConfigError(
            f"{location} lists the synsets in alphabetical order, but the ground truth uses the order of the "
            f"devkit, which starts with n02119789: every label would be wrong; use the devkit's list: {_HOW_TO_LIST}"
        )
    return synsets


def read_ground_truth(folder: str, reader: FileReader, options: SourceOptions) -> list[int]:
    """Return the ILSVRC ids of the validation images; for arguments and errors, see `read_synsets`."""
    advice = f"--ground-truth, the devkit's {_GROUND_TRUTH}"
    location, text = _read_text(options.ground_truth, folder, reader, (_GROUND_TRUTH,), advice)
    ids = []
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        word = line.strip()
        # No id has ten digits, and `int` refuses very long texts.
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise ConfigError(f"line {number} of {location} is {line[:40]!r}; expected one ILSVRC id, such as 490")
        ids.append(int(word))
    if not ids:
        raise ConfigError(f"{location} is empty; expected one ILSVRC id per line")
    return ids


def labels_of(ids: Sequence[int], synsets: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the label of each image: `ids` count `synsets` from 1, labels are indices of `classes`.

    Raises:
        ConfigError: an id is beyond `synsets`, or `synsets` and `classes` differ.
    """
    if set(synsets) != set(classes):
        differing = sorted(set(synsets) ^ set(classes))
        raise ConfigError(
            f"the synset list has {len(synsets)} classes, the training tar {len(classes)}; {len(differing)} are in "
            f"only one of them, such as {differing[0]}; use the list that belongs to this tar"
        )
    label_of_synset = {synset: label for label, synset in enumerate(classes)}
    labels = [label_of_synset[synset] for synset in synsets]  # label of the id `index + 1`
    for number, ilsvrc_id in enumerate(ids, 1):
        if not 1 <= ilsvrc_id <= len(labels):
            raise ConfigError(
                f"line {number} of the ground truth is the id {ilsvrc_id}, but the synset list has {len(labels)} "
                "lines; use the list that belongs to it"
            )
    return [labels[ilsvrc_id - 1] for ilsvrc_id in ids]


def _read_text(
    url: str | None, folder: str, reader: FileReader, names: Sequence[str], advice: str
) -> tuple[str, str]:
    """Return location and text of the file at `url`, else of the first of `names` that exists beside the tars."""
    if url is not None:
        reader = FileReader(url)
        return redact_url(url), _decoded(reader.read(reader.root), redact_url(url), advice)
    for name in names:
        for subfolder in ("", f"{_DEVKIT}/"):
            path = f"{folder}/{subfolder}{name}"
            try:
                return reader.location(path), _decoded(reader.read(path), reader.location(path), advice)
            except NotFoundError:
                continue
    raise NotFoundError(
        f"the validation images have no labels: no {' or '.join(names)} in {reader.location(folder)} or its "
        f"{_DEVKIT}; give {advice}"
    )


def _decoded(content: bytes, location: str, advice: str) -> str:
    """Return the text of a file, with or without a byte order mark. Raise ConfigError if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location} is not a text file: {error}; give {advice}") from error

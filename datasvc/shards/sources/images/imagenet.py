"""ImageNet as it is distributed: a tar of class tars for training, a tar of images for validation. Never unpacked.

The headers of the training tar are read one by one, past each class tar by its size: some 1,000 small reads, one
after another, which take a while on a remote store. Each class tar is a part then, a range of bytes, so that classes
can be read side by side and mixed. Images are kept as they are, those with a PNG inside or in CMYK too.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar, Final, cast

import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, image_field
from datasvc.shards.images.header import EXTENSIONS
from datasvc.shards.sources.common.columns import SampleBatcher
from datasvc.shards.sources.common.files import FileReader, SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.images.imagenet_labels import SYNSET, labels_of, read_ground_truth, read_synsets
from datasvc.shards.sources.tar.tar import LARGEST_MEMBER_BYTES, TarMember, TarReader, open_tar

_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_VAL_IMAGE: Final = re.compile(r".*_val_(\d{8})\.jpe?g", re.IGNORECASE)


@dataclass(frozen=True)
class ImageNet(StreamedSource):
    """The listed tars of ImageNet.

    Attributes:
        url: the training tar, the validation tar, or a folder that holds both.
        parts: the class tars by name, then the validation tar.
        classes: the synsets in alphabetical order.
        val_labels: of the validation images, in the order of their numbers.
        ignored: how many files of each other extension the training tar has.
    """

    kind: ClassVar[str] = "imagenet"

    url: str
    parts: list[SourcePart]
    classes: tuple[str, ...]
    val_labels: tuple[int, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ImageNet:
        """Walk the headers of the training tar, and read the labels of the validation images.

        Raises:
            NotFoundError: neither tar is there, or nothing that labels the validation images; says what to give.
            ConfigError: ground truth, synsets and training tar contradict each other; says in which numbers.
            CorruptDataError: the training tar is truncated, or neither of the two.
            UnavailableError: the store does not answer.
        """
        options = options or SourceOptions()
        reader = FileReader(url)
        folder, tars = _find_tars(url, reader)
        parts: list[SourcePart] = []
        classes: tuple[str, ...] = ()
        val_labels: tuple[int, ...] = ()
        ignored: Counter[str] = Counter()
        for tar in tars:
            if _holds_images(reader, tar):
                synsets = read_synsets(folder, reader, options)
                ids = read_ground_truth(folder, reader, options)
                classes = classes or tuple(sorted(synsets))
                val_labels = tuple(labels_of(ids, synsets, classes))
                parts.append(_val_part(tar, options.split or "val", val_labels))
            else:
                members = _class_tars(reader, tar, ignored)
                classes = tuple(sorted(members))
                parts += [
                    _class_part(tar, options.split or "train", members[name], label)
                    for label, name in enumerate(classes)
                ]
        return cls(url, parts, classes, val_labels, ignored)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the samples."""
        label = pa.field(LABEL, pa.int32(), nullable=False)
        return pa.schema([pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE), label])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the images of a class tar, or of the validation tar; see `StreamedSource.read`.

        Raises:
            ConfigError: the ground truth has fewer lines than there are validation images.
        """
        reader = FileReader(self.url)
        batcher = SampleBatcher(self.schema, part.split)
        num_seen = 0
        with _open_part(reader, part) as stream:
            tar = TarReader(stream, f"{redact_url(self.url)}: {part.name}")
            try:
                for member in tar:
                    name = member.name.rpartition("/")[2]
                    if name.startswith("."):
                        continue
                    num_seen += 1
                    key = f"{self.classes[part.where['label']]}/{name}" if "label" in part.where else name
                    try:
                        _check_image(member)
                        label = part.where["label"] if "label" in part.where else self._val_label(name)
                    except BadSampleError as error:
                        yield BadSample(part.split, key, str(error))
                    else:
                        yield from batcher.add({KEY: key, IMAGE: tar.read(member), LABEL: label})
            except CorruptDataError as error:
                yield from batcher.flush()
                yield BadSample(part.split, part.name, str(error))
                return
        yield from batcher.flush()
        if "label" not in part.where and num_seen < len(self.val_labels):
            reason = f"holds {num_seen} images, but the ground truth has {len(self.val_labels)} lines"
            yield BadSample(part.split, part.name, reason)

    def _val_label(self, name: str) -> int:
        match = _VAL_IMAGE.fullmatch(name)
        if match is None or int(match[1]) == 0:
            raise BadSampleError("its name has no number of the ground truth, as in ILSVRC2012_val_00000001.JPEG")
        if int(match[1]) > len(self.val_labels):
            raise ConfigError(
                f"{name} is validation image {int(match[1])}, but the ground truth has {len(self.val_labels)} lines; "
                "give the one that belongs to this tar"
            )
        return self.val_labels[int(match[1]) - 1]


class _HeaderFile(io.RawIOBase):
    """A file of which each read is one small ranged request, for walking headers."""

    def __init__(self, reader: FileReader, file: SourceFile) -> None:
        self._reader, self._file, self._offset = reader, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR
        self._offset += offset
        return self._offset

    def readinto(self, target: Any) -> int:
        wanted = memoryview(target).cast("B")
        length = max(0, min(len(wanted), self._file.size_bytes - self._offset))
        content = self._reader.read_range(self._file.path, self._offset, length) if length else b""
        wanted[: len(content)] = content
        self._offset += len(content)
        return len(content)


def _find_tars(url: str, reader: FileReader) -> tuple[str, list[SourceFile]]:
    """Return the folder of the tars and those that are there, training first."""
    with map_exceptions("look at", redact_url(url)):
        is_folder = reader.file_system.isdir(reader.root)
    if not is_folder:
        return reader.root.rpartition("/")[0], list_files(url)
    found = []
    for name in (_TRAIN_TAR, _VAL_TAR):
        # Never listed: the folder may hold a million unpacked images too.
        try:
            found += list_files(f"{url.rstrip('/')}/{name}")
        except NotFoundError:
            continue
    if not found:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: neither {_TRAIN_TAR} nor {_VAL_TAR} is in it")
    return reader.root, found


def _holds_images(reader: FileReader, tar: SourceFile) -> bool:
    """Return whether the first file of a tar is an image rather than a class tar."""
    first = next(iter(_walk(reader, tar)), None)
    if first is None or _extension(first.name) not in {".tar", *EXTENSIONS}:
        raise CorruptDataError(
            f"{reader.location(tar.path)} starts with {first.name if first else 'nothing'!r}; expected a class tar, "
            "such as n01440764.tar, or an image"
        )
    return _extension(first.name) != ".tar"


def _class_tars(reader: FileReader, tar: SourceFile, ignored: Counter[str]) -> dict[str, TarMember]:
    """Return the class tars of the training tar by class; counts what else is there in `ignored`."""
    found: dict[str, TarMember] = {}
    for member in _walk(reader, tar):
        base, extension = member.name.rpartition("/")[2], _extension(member.name)
        name = base[: -len(extension)] if extension else base
        if extension != ".tar" or base.startswith("."):
            ignored[extension or "(none)"] += 1
            continue
        if member.problem is not None or not SYNSET.fullmatch(name):
            problem = member.problem or "is not called like a synset, as n01440764.tar is"
            raise ConfigError(f"cannot ingest {reader.location(tar.path)}: its member {member.name} {problem}")
        if name in found:
            raise ConfigError(f"cannot ingest {reader.location(tar.path)}: it has class {name} twice")
        found[name] = member
    return found


def _walk(reader: FileReader, tar: SourceFile) -> TarReader:
    return TarReader(cast("BinaryIO", _HeaderFile(reader, tar)), reader.location(tar.path))


def _class_part(tar: SourceFile, split: str, member: TarMember, label: int) -> SourcePart:
    where = {"path": tar.path, "offset": member.offset, "length": member.size_bytes, "label": label}
    return SourcePart(split, f"{tar.name}/{member.name}", member.size_bytes, stamp=tar.stamp, where=where)


def _val_part(tar: SourceFile, split: str, labels: Sequence[int]) -> SourcePart:
    stamp = f"{tar.stamp} {digest_of(repr(labels).encode())}"
    return SourcePart(split, tar.name, tar.size_bytes, len(labels), stamp, {"path": tar.path})


def _open_part(reader: FileReader, part: SourcePart) -> BinaryIO:
    if "offset" not in part.where:
        return open_tar(reader, part.where["path"])
    start = part.where["offset"]
    return open_tar(reader, part.where["path"], start=start, stop=start + part.where["length"])


def _check_image(member: TarMember) -> None:
    """Raise BadSampleError when a member cannot be a sample."""
    if member.problem is not None:
        raise BadSampleError(f"{member.name} {member.problem}")
    if _extension(member.name) not in EXTENSIONS:
        raise BadSampleError(f"{member.name} is no image by its name")
    if member.size_bytes > LARGEST_MEMBER_BYTES:
        raise BadSampleError(f"{member.name} has {member.size_bytes} bytes, more than {LARGEST_MEMBER_BYTES}")


def _extension(name: str) -> str:
    base = name.rpartition("/")[2]
    return f".{base.rpartition('.')[2].lower()}" if "." in base else ""

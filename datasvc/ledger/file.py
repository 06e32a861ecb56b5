"""A ledger's files: what one rank handed over from one cursor on, in records of 64 bytes.

    magic, format, CRC-32 and JSON of the header, filled up with spaces to a multiple of 64 bytes
    record: CRC-32 of the rest, kind, epoch, start, stop, period, offset, length, number of positions

Integers are little-endian. A record that its rank adds to is written again where it stands. As 64 divides a page, a
process that is killed leaves a record as it was or as it became: what a file says is exact to the batch. A power cut
may take the last seconds of a file; what it tears is found by its checksum. A file that it left empty, or all zeros,
says nothing and is left out, as if its rank had not begun.

A file is called NUMBER-rankR-of-N-RANDOM.ledger. NUMBER is one more than the highest in the folder when the rank
began, so a run that continues another has higher numbers than that one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from datasvc.durable import TEMPORARY_PREFIX, fsync_folder, make_folder
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.ledger.strided_range import StridedRange

FORMAT: Final = 1
SUFFIX: Final = ".ledger"
RECORD_BYTES: Final = 64

_MAGIC = b"datasvc-ledger"
_MAX_HEADER = 1 << 20
_RECORD = struct.Struct("<IIqqqqqqq")
_NAME = re.compile(r"(\d+)-rank\d+-of-\d+-[0-9a-f]+\.ledger")
_LARGEST = 1 << 62


class RecordKind(IntEnum):
    """What became of positions.

    SERVED were handed over; those of them that are MASKED too did not decode and were handed over as nothing. PADDED
    were handed over once more, masked, to fill a batch. DROPPED are those that filled no batch.
    """

    SERVED = 1
    MASKED = 2
    PADDED = 3
    DROPPED = 4


_KINDS = frozenset(RecordKind)


@dataclass(frozen=True)
class LedgerRecord:
    """What became of some positions of an epoch.

    Attributes:
        kind: that.
        epoch: counted from 0.
        comb: the positions. Of those served, the window ends where the rank stood then.
        count: how many positions were counted when they were handed over: as many as the comb has.
    """

    kind: RecordKind
    epoch: int
    comb: StridedRange
    count: int

    def encode(self) -> bytes:
        """Return the record as 64 bytes."""
        comb = self.comb
        fields = (self.epoch, comb.start, comb.stop, comb.period, comb.offset, comb.length, self.count)
        body = _RECORD.pack(0, self.kind, *fields)[4:]
        return zlib.crc32(body).to_bytes(4, "little") + body

    @classmethod
    def decode(cls, content: bytes) -> LedgerRecord:
        """Return what `encode` gave. Raises CorruptDataError, saying what is wrong."""
        checksum, kind, epoch, start, stop, period, offset, length, count = _RECORD.unpack(content)
        if zlib.crc32(content[4:]) != checksum:
            raise CorruptDataError("its checksum differs")
        comb = StridedRange(start, stop, period, offset, length)
        in_range = min(epoch, start, offset, length) >= 0 and start <= stop < _LARGEST and offset < period
        if kind not in _KINDS or not in_range or comb.size != count:
            raise CorruptDataError("its fields contradict one another")
        return cls(RecordKind(kind), epoch, comb, count)


@dataclass(frozen=True)
class Header:
    """Whose file this is, and where it begins.

    Attributes:
        order: the loader's state without epoch and position: version and order, or a mixture's.
        source: what was read, "digits@1/train".
        num_samples: of an epoch.
        data_rank: of the process.
        data_world_size: number of data ranks.
        batch_size: samples of this rank per step.
        tail: "drop", "short" or "pad".
        epoch: where the file begins.
        position: likewise.
        started: seconds since 1970 when it began, for people and for ledgers of several folders.
    """

    order: Mapping[str, Any]
    source: str
    num_samples: int
    data_rank: int
    data_world_size: int
    batch_size: int
    tail: str
    epoch: int
    position: int
    started: float

    def encode(self) -> bytes:
        """Return the header as bytes."""
        body = json.dumps(asdict(self), sort_keys=True).encode()
        start = b"%s %d %08x " % (_MAGIC, FORMAT, zlib.crc32(body))
        length = len(start) + len(body) + 1
        return start + body + b" " * (-length % RECORD_BYTES) + b"\n"


@dataclass(frozen=True)
class LedgerFile:
    """A file that was read.

    Attributes:
        path: of the file.
        number: in its folder.
        header: whose it is.
        records: in the order in which they were begun.
        torn: whether its end was cut off by a crash; what was whole is in `records`.
        damage: what is wrong in the middle, a line each.
    """

    path: Path
    number: int
    header: Header
    records: Sequence[LedgerRecord]
    torn: bool
    damage: Sequence[str]


def create_ledger_file(folder: Path, header: Header) -> tuple[Path, int]:
    """Begin a file in `folder`, which is made where it is missing: whole with its header, or not at all.

    Header and name are synced, once in the life of a file: a power cut takes records at most.

    Returns:
        The file, and the byte at which its records begin.

    Raises:
        UnavailableError: the folder cannot be listed.
        OSError: it cannot be made or written.
    """
    make_folder(folder)
    unique = secrets.token_hex(8)
    temporary = folder / f"{TEMPORARY_PREFIX}{unique}"
    content = header.encode()
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # Listed after the folder was changed: a client of a network file system then asks its server.
        number = max((number for number, _ in list_files(folder)), default=0) + 1
        name = f"{number:08}-rank{header.data_rank}-of-{header.data_world_size}-{unique}{SUFFIX}"
        path = temporary.rename(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(folder)
    return path, len(content)


def list_files(folder: Path) -> list[tuple[int, Path]]:
    """Return number and path of each file of a ledger, in the order of their names. Raises UnavailableError."""
    try:
        found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:
        raise UnavailableError(f"cannot read the ledger {folder}: {error}") from error
    return sorted((int(match[1]), path) for match, path in found)


def read_ledger(path: Path) -> Iterator[LedgerFile | CorruptDataError]:
    """Yield the files of a ledger, in the order of their numbers; of one without a readable header the error.

    Files that a power cut left empty are left out.

    Args:
        path: a folder; or one file.

    Raises:
        NotFoundError: nothing there.
        ConfigError: a file of a later format.
        UnavailableError: a file cannot be read.
    """
    files = list_files(path) if path.is_dir() else [(_number_of(path), path)]
    if not files:
        raise NotFoundError(f"{path} has no files of a ledger (*{SUFFIX}); give what a loader got as ledger=")
    for number, each in files:
        content = _read_bytes(each)
        if not any(content):
            continue
        try:
            yield _parse_file(each, number, content)
        except CorruptDataError as error:
            yield error


def read_header(path: Path) -> Header:
    """Return the header of one file. Raises CorruptDataError, ConfigError, UnavailableError."""
    return _parse_header(path, _read_bytes(path, _MAX_HEADER))[0]


def _number_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_file():
        raise NotFoundError(f"{path} is neither a folder nor a file of a ledger (*{SUFFIX})")
    return int(match[1])


def _read_bytes(path: Path, length: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(length)
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error}") from error


def _parse_header(path: Path, content: bytes) -> tuple[Header, int]:
    """Return the header and its length."""
    line = content[: content.find(b"\n", 0, _MAX_HEADER) + 1]
    magic, _, rest = line.partition(b" ")
    number, _, rest = rest.partition(b" ")
    checksum, _, body = rest.partition(b" ")
    if magic != _MAGIC or not number.isdigit():
        raise CorruptDataError(f"{path} does not begin as a file of a ledger; it is left out")
    if int(number) != FORMAT:
        raise ConfigError(f"{path} has format {int(number)}; this datasvc reads format {FORMAT}")
    body = body.rstrip()
    if b"%08x" % zlib.crc32(body) != checksum or len(line) % RECORD_BYTES:
        raise CorruptDataError(f"the header of {path} is damaged; the file is left out")
    return Header(**json.loads(body)), len(line)


def _parse_file(path: Path, number: int, content: bytes) -> LedgerFile:
    header, offset = _parse_header(path, content)
    num_records, rest = divmod(len(content) - offset, RECORD_BYTES)
    places = [offset + index * RECORD_BYTES for index in range(num_records)]
    torn = bool(rest)
    records, damage = [], []
    for index, place in enumerate(places):
        try:
            records.append(LedgerRecord.decode(content[place : place + RECORD_BYTES]))
        except CorruptDataError as error:
            if not any(content[place:]):  # a power cut left a hole at the end
                torn = True
                break
            damage.append(f"{path}: record {index}, at byte {place}: {error}")
    return LedgerFile(path, number, header, records, torn, damage)

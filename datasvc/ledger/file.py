"""Format of ledger files, which a loader writes and `audit` reads: the positions that one rank has served.

A file has a header, with the cursor (epoch, position) of the first batch, and records of 64 bytes:

    header: magic, format, CRC-32 and JSON, padded with spaces to a multiple of 64 bytes
    record: CRC-32 of the rest, kind, epoch, start, stop, period, offset and length (`StridedRange`), count

The lowest 8 bits of the second field are the kind, and the others the lost rank of a RETURNED record. Format 1 has no
RETURNED records, and formats 1 and 2 have no CARRIED ones.

Integers are little-endian. A rank extends its last record in place. Because 64 divides the page size, a killed
process leaves either the old record or the new one, so a file is correct up to the last batch. A power cut may lose
the last seconds of a file. Checksums detect incomplete records, and a file that is empty or all zeros is ignored.

A file is named NUMBER-rankR-of-N-RANDOM.ledger. NUMBER is one more than the highest number in the folder when the
rank starts, so a run has higher numbers than the one that it continues. Ranks that start together may share one.
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

FORMAT: Final = 3
_FORMATS: Final = (1, 2, FORMAT)  # that are read
SUFFIX: Final = ".ledger"
RECORD_BYTES: Final = 64

_MAGIC = b"datasvc-ledger"
_MAX_HEADER_BYTES = 1 << 20
_RECORD = struct.Struct("<IIqqqqqqq")  # the fields of a record in the order above
_NAME = re.compile(r"(\d+)-rank\d+-of-\d+-[0-9a-f]+\.ledger")
_MAX_POSITION = 1 << 62  # positions are computed as int64, so keep them far below 2**63


class RecordKind(IntEnum):
    """Outcome of the samples at some positions.

    Attributes:
        SERVED: in a batch.
        MASKED: in a batch, but masked, because the sample did not decode; the position is recorded as SERVED too.
        PADDED: served again, masked, to fill a batch.
        DROPPED: left over at the end of an epoch, too few for a batch.
        LEFT_OUT: in a batch, but masked, because the run masks this position or sample; recorded as SERVED too.
        RETURNED: served, perhaps, by a rank that was lost before its update was applied, and granted to this rank.
        CARRIED: served in an earlier attempt, in a round in which a replica was lost; weights that have learned from
            them are continued. A record without positions has the window of the round.
    """

    SERVED = 1
    MASKED = 2
    PADDED = 3
    DROPPED = 4
    LEFT_OUT = 5
    RETURNED = 6
    CARRIED = 7


_KINDS = frozenset(RecordKind)


@dataclass(frozen=True)
class LedgerRecord:
    """Outcome of some positions of an epoch.

    Attributes:
        kind: outcome of the positions.
        epoch: epoch, counted from 0.
        strided: the positions as one range. For SERVED, its `stop` is the rank's position after the batch.
        count: number of positions, counted when they were served; equal to `strided.size`.
        lost_rank: of RETURNED, the data rank that was lost; else 0.
    """

    kind: RecordKind
    epoch: int
    strided: StridedRange
    count: int
    lost_rank: int = 0

    def encode(self) -> bytes:
        """Return the record as 64 bytes."""
        strided = self.strided
        fields = (self.epoch, strided.start, strided.stop, strided.period, strided.offset, strided.length, self.count)
        # The first field is the checksum of all others.
        body = _RECORD.pack(0, self.kind | self.lost_rank << 8, *fields)[4:]
        return zlib.crc32(body).to_bytes(4, "little") + body

    @classmethod
    def decode(cls, content: bytes) -> LedgerRecord:
        """Return the record from the result of `encode`.

        Raises:
            CorruptDataError: the checksum or the fields are inconsistent; `_parse_file` adds the place.
        """
        checksum, kind, epoch, start, stop, period, offset, length, count = _RECORD.unpack(content)
        if zlib.crc32(content[4:]) != checksum:
            raise CorruptDataError("its checksum does not match")
        lost_rank, kind = divmod(kind, 1 << 8)
        strided = StridedRange(start, stop, period, offset, length)
        is_valid_window = 0 <= start <= stop < _MAX_POSITION
        is_valid = epoch >= 0 and is_valid_window and 0 <= offset < period and length >= 0
        is_valid_kind = kind in _KINDS and (kind == RecordKind.RETURNED or not lost_rank)
        if not is_valid_kind or not is_valid or strided.size != count:
            raise CorruptDataError("its fields contradict each other")
        return cls(RecordKind(kind), epoch, strided, count, lost_rank)


@dataclass(frozen=True)
class Header:
    """Header of a file: its rank, data and first cursor.

    Attributes:
        order: version and access order of a split or mixture: the loader's state without epoch and position, as JSON.
        source: data that is read, such as "digits@1/train".
        num_samples: samples of an epoch.
        data_rank: data rank of the process.
        data_world_size: number of data ranks.
        batch_size: samples of this rank per step.
        tail: "drop", "short" or "pad".
        epoch: epoch of the first batch.
        position: position of the first batch.
        started: start time in seconds since 1970; files of several folders are ordered by it.
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
        """Return the header as bytes: one line, whose length is a multiple of `RECORD_BYTES`."""
        body = json.dumps(asdict(self), sort_keys=True).encode()
        start = b"%s %d %08x " % (_MAGIC, FORMAT, zlib.crc32(body))
        length = len(start) + len(body) + 1
        return start + body + b" " * (-length % RECORD_BYTES) + b"\n"


@dataclass(frozen=True)
class LedgerFile:
    """Content of a file.

    Attributes:
        path: path of the file.
        number: number of the file in its folder.
        header: rank, data and first cursor.
        records: complete records, in the order in which they were started.
        torn: whether a crash cut off the end of the file.
        damage: descriptions of damaged records.
    """

    path: Path
    number: int
    header: Header
    records: Sequence[LedgerRecord]
    torn: bool
    damage: Sequence[str]


def create_ledger_file(folder: Path, header: Header) -> tuple[Path, int]:
    """Create a file with its header, atomically, in `folder`, which is created if it does not exist.

    The header and the name of the file are synced, so a power cut can lose only records.

    Returns:
        Path of the file, and the offset of its first record in bytes.

    Raises:
        UnavailableError: the folder cannot be listed.
        OSError: the folder or the file cannot be written.
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
        # List the folder after the temporary file was created in it: the client of a network file system then does
        # not return a cached list.
        number = max((number for number, _ in list_files(folder)), default=0) + 1
        name = f"{number:08}-rank{header.data_rank}-of-{header.data_world_size}-{unique}{SUFFIX}"
        path = temporary.rename(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(folder)
    return path, len(content)


def list_files(folder: Path) -> list[tuple[int, Path]]:
    """Return number and path of each file of a ledger, sorted. Raises UnavailableError: `folder` cannot be listed."""
    try:
        matches = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:
        raise UnavailableError(f"cannot read the ledger {folder}: {error}") from error
    return sorted((int(match[1]), path) for match, path in matches)


def read_ledger(path: Path) -> Iterator[LedgerFile | CorruptDataError]:
    """Yield the files of a ledger, sorted by number; for a file with a damaged header, yield the error.

    Files that are empty after a power cut are ignored.

    Args:
        path: folder of the ledger, or one file.

    Raises:
        NotFoundError: there is no file of a ledger at `path`.
        ConfigError: a file has another format.
        UnavailableError: a file cannot be read.
    """
    files = list_files(path) if path.is_dir() else [(_number_of(path), path)]
    if not files:
        raise NotFoundError(
            f"{path} has no files of a ledger (*{SUFFIX}); give the folder that a loader got as ledger="
        )
    for number, file in files:
        content = _read_bytes(file)
        if not any(content):
            continue  # empty or all zeros after a power cut
        try:
            yield _parse_file(file, number, content)
        except CorruptDataError as error:
            yield error


def read_header(path: Path) -> Header:
    """Return the header of one file.

    Raises:
        CorruptDataError: the header is damaged.
        ConfigError: the file has another format.
        UnavailableError: the file cannot be read.
    """
    return _parse_header(path, _read_bytes(path, _MAX_HEADER_BYTES))[0]


def _number_of(path: Path) -> int:
    """Return the number in the name of a ledger file; raise NotFoundError if `path` is not a ledger file."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_file():
        raise NotFoundError(
            f"{path} is neither a folder nor a file of a ledger (*{SUFFIX}); give the path that a loader got as "
            "ledger="
        )
    return int(match[1])


def _read_bytes(path: Path, length: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(length)
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error}") from error


def _parse_header(path: Path, content: bytes) -> tuple[Header, int]:
    """Return the header and its length in bytes; for errors, see `read_header`."""
    # The header is the first line. A damaged file may have no line feed, so limit the search.
    line = content[: content.find(b"\n", 0, _MAX_HEADER_BYTES) + 1]
    magic, _, fields = line.partition(b" ")
    format_number, _, fields = fields.partition(b" ")
    checksum, _, body = fields.partition(b" ")
    if magic != _MAGIC or not format_number.isdigit():
        raise CorruptDataError(f"{path} does not start with the header of a ledger; the file is ignored")
    if int(format_number) not in _FORMATS:
        raise ConfigError(
            f"{path} has format {int(format_number)}; this datasvc reads the formats {_FORMATS[0]} to {FORMAT}: use "
            "a matching release"
        )
    body = body.rstrip()
    if b"%08x" % zlib.crc32(body) != checksum or len(line) % RECORD_BYTES:
        raise CorruptDataError(f"the header of {path} is damaged; the file is ignored")
    return Header(**json.loads(body)), len(line)


def _parse_file(path: Path, number: int, content: bytes) -> LedgerFile:
    """Return the content of a file, with a description of each damaged record; for errors, see `read_header`."""
    header, header_bytes = _parse_header(path, content)
    num_records, num_torn_bytes = divmod(len(content) - header_bytes, RECORD_BYTES)
    torn = bool(num_torn_bytes)
    records, damage = [], []
    for index in range(num_records):
        start = header_bytes + index * RECORD_BYTES
        try:
            records.append(LedgerRecord.decode(content[start : start + RECORD_BYTES]))
        except CorruptDataError as error:
            if not any(content[start:]):  # zeros at the end of the file, after a power cut
                torn = True
                break
            damage.append(f"{path}: record {index}, at byte {start}: {error}")
    return LedgerFile(path, number, header, records, torn, damage)

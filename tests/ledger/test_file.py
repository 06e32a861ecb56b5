"""The files of a ledger: what is written is read, and damage is told from a crash."""

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.ledger.file import (
    RECORD_BYTES,
    Header,
    LedgerRecord,
    RecordKind,
    create_ledger_file,
    list_files,
    read_header,
    read_ledger,
)
from datasvc.ledger.strided_range import StridedRange, contiguous
from tests.ledger.test_strided_range import COMBS

HEADER = Header({"version": "aa", "seed": 1}, "numbers@1/train", 40, 1, 2, 4, "drop", 0, 8, 1.5)
RECORDS = [
    LedgerRecord(RecordKind.SERVED, 0, contiguous(8, 24), 16),
    LedgerRecord(RecordKind.MASKED, 0, contiguous(9, 10), 1),
    LedgerRecord(RecordKind.SERVED, 1, StridedRange(0, 16, 8, 4, 4), 8),
]


@pytest.fixture
def path(tmp_path):
    """A file with three records."""
    path, _ = create_ledger_file(tmp_path / "ledger", HEADER)
    with path.open("ab") as file:
        file.writelines(record.encode() for record in RECORDS)
    return path


@given(kind=st.sampled_from(RecordKind), epoch=st.integers(0, 1 << 40), strided=COMBS, far=st.integers(0, 1 << 50))
def test_a_record_is_read_as_it_was_written(kind, epoch, strided, far):
    there = dataclasses.replace(strided, start=strided.start + far, stop=strided.stop + far)
    record = LedgerRecord(kind, epoch, there, there.size)
    assert len(record.encode()) == RECORD_BYTES
    assert LedgerRecord.decode(record.encode()) == record


@given(bit=st.integers(0, 8 * RECORD_BYTES - 1))
def test_a_flipped_bit_is_found(bit):
    content = bytearray(RECORDS[2].encode())
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptDataError):
        LedgerRecord.decode(bytes(content))


@pytest.mark.parametrize(
    "strided",
    [
        StridedRange(0, 4, 0, 0, 1),
        StridedRange(4, 0, 1, 0, 1),
        StridedRange(-1, 4, 1, 0, 1),
        StridedRange(0, 4, 2, 2, 1),
        StridedRange(0, 4, 2, 0, -1),
    ],
)
def test_fields_that_contradict_one_another_are_damage_though_the_checksum_is_right(strided):
    with pytest.raises(CorruptDataError, match="contradict"):
        LedgerRecord.decode(LedgerRecord(RecordKind.SERVED, 0, strided, 4).encode())


def test_a_count_that_is_not_that_of_the_positions_is_damage():
    with pytest.raises(CorruptDataError, match="contradict"):
        LedgerRecord.decode(LedgerRecord(RecordKind.SERVED, 0, contiguous(0, 4), 5).encode())


def test_a_file_is_read_as_it_was_written(path):
    (found,) = read_ledger(path.parent)
    assert (found.path, found.number, found.header) == (path, 1, HEADER)
    assert (list(found.records), found.torn, list(found.damage)) == (RECORDS, False, [])
    assert list(read_ledger(path)) == [found]
    assert read_header(path) == HEADER
    assert (path.stat().st_size - 3 * RECORD_BYTES) % RECORD_BYTES == 0


def test_a_new_file_has_a_higher_number_than_all_before(path):
    folder = path.parent
    made = [create_ledger_file(folder, HEADER)[0] for _ in range(2)]
    assert list_files(folder) == [(1, path), (2, made[0]), (3, made[1])]
    assert made[0].name.startswith("00000002-rank1-of-2-")
    assert [each.name for each in folder.iterdir() if each.suffix != ".ledger"] == []


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_records_before_an_end_that_a_crash_cut_off_count(path, cut):
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    (found,) = read_ledger(path)
    assert list(found.records) == RECORDS[: 3 - -(-cut // RECORD_BYTES)]
    assert (found.torn, list(found.damage)) == (cut != 64, [])


def test_a_hole_at_the_end_is_that_of_a_power_cut(path):
    with path.open("ab") as file:
        file.write(bytes(2 * RECORD_BYTES))
    (found,) = read_ledger(path)
    assert (list(found.records), found.torn, list(found.damage)) == (RECORDS, True, [])


@pytest.mark.parametrize("content", [b"", bytes(10), bytes(5 * RECORD_BYTES)])
def test_a_file_that_a_power_cut_left_empty_is_ignored(path, content):
    (whole,) = read_ledger(path)
    empty, _ = create_ledger_file(path.parent, HEADER)
    empty.write_bytes(content)
    assert list(read_ledger(path.parent)) == [whole]
    assert list(read_ledger(empty)) == []
    with pytest.raises(CorruptDataError):
        read_header(empty)


def test_a_new_file_survives_a_power_cut_before_its_name_is_used(tmp_path, monkeypatch):
    """The header is synced under a name that no reader looks at, then the folder with the name."""
    synced, real = [], os.fsync

    def fsync(descriptor):
        real(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), len(list_files(tmp_path))))

    monkeypatch.setattr(os, "fsync", fsync)
    create_ledger_file(tmp_path, HEADER)
    (content, folder) = synced
    assert content[0].startswith(f"{tmp_path}/.tmp-")
    assert content[1] == 0
    assert folder == (str(tmp_path), 1)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_damaged_record_is_named_and_the_others_count(path, index):
    content = bytearray(path.read_bytes())
    place = len(content) - (3 - index) * RECORD_BYTES
    content[place + 20] ^= 1
    path.write_bytes(content)
    (found,) = read_ledger(path)
    assert list(found.records) == RECORDS[:index] + RECORDS[index + 1 :]
    assert list(found.damage) == [f"{path}: record {index}, at byte {place}: its checksum does not match"]


@pytest.mark.parametrize("place", [0, 20, 60])
def test_a_damaged_header_leaves_the_file_out(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    (found,) = read_ledger(path)
    assert isinstance(found, CorruptDataError)
    assert str(path) in str(found)


def test_a_later_format_is_refused(path):
    path.write_bytes(path.read_bytes().replace(b"datasvc-ledger 3 ", b"datasvc-ledger 4 ", 1))
    with pytest.raises(ConfigError, match=r"has format 4; this datasvc reads the formats 1 to 3"):
        list(read_ledger(path))


def test_an_older_format_is_read(path):
    (written,) = read_ledger(path)
    path.write_bytes(path.read_bytes().replace(b"datasvc-ledger 3 ", b"datasvc-ledger 2 ", 1))
    (found,) = read_ledger(path)
    assert found == written


def test_a_record_has_a_lost_rank_only_if_it_is_of_returned_samples():
    strided = contiguous(3, 5)
    record = LedgerRecord(RecordKind.RETURNED, 1, strided, 2, lost_rank=70_000)
    assert LedgerRecord.decode(record.encode()) == record
    with pytest.raises(CorruptDataError, match="contradict"):
        LedgerRecord.decode(LedgerRecord(RecordKind.SERVED, 1, strided, 2, lost_rank=1).encode())


def test_a_path_without_a_ledger_is_refused(tmp_path, path):
    with pytest.raises(NotFoundError, match="no files of a ledger"):
        list(read_ledger(tmp_path))
    with pytest.raises(NotFoundError, match="neither a folder nor a file"):
        list(read_ledger(tmp_path / "x"))

import json
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository import Storage
from datasvc.repository.logs.log import Log, decode_entry, encode_entry

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda key: key not in {"checksum", "format"}), json_values))
def test_an_entry_decodes_to_what_was_encoded(content):
    assert decode_entry(encode_entry(content), "here") == content


def test_a_changed_byte_anywhere_in_an_entry_is_noticed():
    raw = encode_entry({"format": 1, "commit": "abc", "splits": {"train": [1, 2.5]}})
    for place in range(len(raw) - 1):  # but for the line end, which says nothing
        changed = bytearray(raw)
        changed[place] ^= 0x04
        try:
            decoded = decode_entry(bytes(changed), "here")
        except (CorruptDataError, ConfigError):
            continue
        assert decoded == decode_entry(raw, "here"), "changed white space only"


def test_appends_are_numbered_from_one_and_build_on_the_head(url):
    log = Log(Storage(url), "log")
    assert log.head() == 0
    assert [log.append(lambda head: {"on": head}).number for _ in range(3)] == [1, 2, 3]
    assert [entry.content["on"] for entry in log.entries()] == [0, 1, 2]
    assert log.head() == 3


def test_an_append_that_loses_the_race_rebases(url):
    log = Log(Storage(url), "log")

    def build(head):
        if head == 0:
            log.append(lambda _head: {"who": "faster"})
        return {"who": "slower", "on": head}

    assert log.append(build).number == 2
    assert [entry.content["who"] for entry in log.entries()] == ["faster", "slower"]
    assert log.read(2).content["on"] == 1


def test_an_append_that_always_loses_gives_up_with_a_conflict(url, monkeypatch):
    monkeypatch.setattr("datasvc.repository.logs.log._APPEND_ATTEMPTS", 4)
    log = Log(Storage(url), "log")

    def build(_head):
        log._storage.create(f"log/{log.head() + 1:08d}.json", encode_entry({"format": 1}))
        return {"who": "unlucky"}

    with pytest.raises(ConflictError, match="other writers committed first"):
        log.append(build)
    assert all("who" not in entry.content for entry in log.entries())


def append_many(url, writer, count):
    log = Log(Storage(url), "log")
    for number in range(count):
        log.append(lambda _head, number=number: {"writer": writer, "number": number})


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_appends_of_many_processes_all_land_once_and_in_each_writers_order(tmp_path):
    url, context = str(tmp_path), multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_many, args=(url, writer, 20)) for writer in range(4)]
    [process.start() for process in writers]
    [process.join() for process in writers]
    assert [process.exitcode for process in writers] == [0] * 4
    entries = Log(Storage(url), "log").entries()
    assert [entry.number for entry in entries] == list(range(1, 81))
    for writer in range(4):
        own = [entry.content["number"] for entry in entries if entry.content["writer"] == writer]
        assert own == list(range(20))


def test_the_error_of_a_missing_entry_lists_the_existing_ones(tmp_path):
    log = Log(Storage(str(tmp_path)), "log")
    log.append(lambda _head: {})
    with pytest.raises(NotFoundError, match="has no entry 7; it has 1"):
        log.read(7)


def test_an_entry_of_a_later_format_is_refused():
    raw = json.dumps({"format": 2, "checksum": "?"}).encode()
    with pytest.raises(ConfigError, match="format 2; this datasvc reads up to 1: upgrade"):
        decode_entry(raw, "here")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"format": 1}', b"\xff\xfe", b'{"format": 1, "a": NaN}', b'{"format": 1e400}'],
)
def test_what_is_no_entry_is_corrupt(raw):
    with pytest.raises(CorruptDataError):
        decode_entry(raw, "here")


def test_content_that_is_no_json_is_refused():
    with pytest.raises(ConfigError, match="cannot be stored as JSON"):
        encode_entry({"loss": float("nan")})


def test_two_writers_of_equal_content_both_land(url, monkeypatch):
    """Each knows its own entry by the commit id, even in the same second."""
    monkeypatch.setattr("datasvc.repository.logs.log._now", lambda: "2026-01-01T00:00:00+00:00")
    log = Log(Storage(url), "log")

    def build(head):
        if head == 0:
            log.append(lambda _head: {"same": True})
        return {"same": True}

    assert log.append(build).number == 2
    assert log.head() == 2


def test_the_fields_of_the_log_itself_are_never_replaced_by_content(tmp_path):
    log = Log(Storage(str(tmp_path)), "log")
    content = log.append(lambda _head: {"format": 7, "commit": "mine"}).content
    assert content["format"] == 1
    assert content["commit"] != "mine"


def test_a_store_whose_listings_lag_behind_does_not_stop_an_append(tmp_path, monkeypatch):
    log = Log(Storage(str(tmp_path)), "log")
    for _ in range(3):
        log.append(lambda _head: {})
    monkeypatch.setattr(log, "head", lambda: 1)
    assert log.append(lambda head: {"on": head}).content["on"] == 3


@pytest.mark.parametrize("num_entries", [1, 2, 3, 7, 8, 20])
def test_what_came_after_an_entry_is_found_without_a_list(tmp_path, num_entries, monkeypatch):
    log = Log(Storage(str(tmp_path)), "log")
    for _ in range(num_entries):
        log.append(lambda _head: {})
    monkeypatch.setattr(Storage, "list", None)
    for known in range(1, num_entries + 1):
        assert list(log.numbers_after(known)) == list(range(known + 1, num_entries + 1))


def test_a_damaged_format_number_is_damage_and_no_later_format(tmp_path):
    log = Log(Storage(str(tmp_path)), "log")
    log.append(lambda _head: {"step": 1})
    path = tmp_path / "log/00000001.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9'))
    with pytest.raises(CorruptDataError, match="its format number was changed"):
        log.read(1)

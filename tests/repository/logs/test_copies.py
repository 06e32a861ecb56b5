"""The log of copies: what left the repository, without secrets, and without an error for a copy that is complete."""

import getpass
import os
import socket
import warnings

import pytest

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Storage
from datasvc.repository.logs.copies import EXPORT, TRANSFER, RecordedCopy, read_copy_log, record_copies, user_and_host
from datasvc.repository.logs.log import Log
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.storage import ReadOnlyStorage


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


def copy(version="pets@1", destination="/data/out", kind=EXPORT, redactions=0):
    return RecordedCopy(version, kind, destination, 5, {"train": digest_of(version.encode())}, redactions)


@pytest.mark.parametrize(
    ("url", "recorded"),
    [
        ("s3://AKIA:wJalr@bucket/repo", "s3://bucket/repo"),
        ("https://ann:pw@host:8443/repo?X-Amz-Signature=ab&token=cd#ef", "https://host:8443/repo"),
        ("az://container@account/repo?sv=2024&sig=ab%3D", "az://container@account/repo"),
        ("abfs://user:key@account/repo", "abfs://account/repo"),
        ("dir::s3://key:secret@bucket/repo?token=ab", "dir::s3://bucket/repo"),
        ("/data/what?", "/data/what?"),
    ],
)
def test_a_destination_is_recorded_without_secrets(storage, tmp_path, url, recorded):
    record_copies(storage, [copy(destination=url)])
    (found,) = read_copy_log(storage)
    assert (found.destination, found.by) == (recorded, user_and_host())
    text = (tmp_path / "copies/00000001.json").read_text()
    assert not any(secret in text for secret in ("wJalr", "pw@", "ab&", "sig=", "user:key", "secret", "token"))


def test_copies_of_one_call_are_one_entry_and_the_same_again_none(storage):
    for _ in range(2):
        record_copies(storage, [copy("pets@1"), copy("pets@2")])
        record_copies(storage, [copy(kind=TRANSFER)])
        record_copies(storage, [])
    assert Log(storage, "copies").numbers() == [1, 2]
    record_copies(storage, [copy(kind=TRANSFER, redactions=1)])
    found = [(each.version, each.kind, each.redactions) for each in read_copy_log(storage)]
    assert found == [("pets@1", EXPORT, 0), ("pets@2", EXPORT, 0), ("pets@1", TRANSFER, 0), ("pets@1", TRANSFER, 1)]


def test_a_copy_that_cannot_be_recorded_is_a_warning(storage, tmp_path):
    with pytest.warns(UserWarning, match=r"/data/out is complete, but not recorded in .*opened read-only"):
        record_copies(ReadOnlyStorage(str(tmp_path)), [copy()])
    assert read_copy_log(storage) == []
    # An entry that cannot be read is no reason to record nothing after it.
    record_copies(storage, [copy()])
    (tmp_path / "copies/00000001.json").write_text("no JSON")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_copies(storage, [copy()])
    assert Log(storage, "copies").numbers() == [1, 2]


@pytest.mark.parametrize("content", [{"versions": [{"version": "pets@1"}]}, {"versions": 3}, {}])
def test_an_entry_that_is_not_valid_is_an_error_of_the_log(storage, content):
    Log(storage, "copies").append(lambda _: {"kind": EXPORT, "destination": "/data", "redactions": 0, **content})
    with pytest.raises(CorruptDataError, match=r"entry 1 of the log copies is not valid.*restore it"):
        read_copy_log(storage)
    Log(storage, "copies").append(lambda _: {})
    (path,) = (storage.local_path("copies/00000002.json"),)
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises((ConfigError, CorruptDataError)):
        read_copy_log(storage)


def test_a_user_without_a_name_is_a_number(monkeypatch):
    def nameless():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert user_and_host() == f"{os.getuid()}@{socket.gethostname()}"


def test_a_folder_of_another_host_is_another_place():
    here, there = (RecordedCopy("pets@1", TRANSFER, "/data/repo", 5, {}, 0, by=f"ann@{host}") for host in ("a", "b"))
    assert here.place != there.place
    assert (copy(destination="s3://bucket/repo").place) == ("s3://bucket/repo", "")

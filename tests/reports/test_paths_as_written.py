"""Names of files and folders that other programs take for patterns, URLs or text."""

import os
from pathlib import Path

import pytest

import datasvc
from datasvc.errors import DatasvcError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg

NAMES = [
    "set [1]",
    "a{b,c}",
    "what?",
    "all *",
    "~me",
    "no#1",
    "50%20off",
    "a b",
    "x::y",
    "10:30",
    "data:",
    "[",
    "{0..3}",
]


def write(folder, name="0.csv", content=b"x\n1\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_found_under_its_name(tmp_path, monkeypatch, name):
    """huggingface/datasets#7468, CNES/MAJA#16, LiberTEM/LiberTEM#1066: brackets in a folder's name were a pattern."""
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / name / "in")
    write(folder, "b.csv")
    repository = Repository.create(f"{name}/repo")
    assert ingest(repository, str(folder), "absolute").num_samples == {"train": 2}
    assert ingest(repository, f"{name}/in", "relative").num_samples == {"train": 2}
    assert ingest(repository, f"{name}/in/0.csv", "file").num_samples == {"train": 1}
    assert ingest(repository, f"{name}/in/*.csv", "pattern").num_samples == {"train": 2}
    assert ingest(repository, f"{name}/in/{{0,b}}.csv", "braces").num_samples == {"train": 2}
    entry = open_dataset(Repository.open(str(tmp_path / name / "repo")), "relative").entry.content
    assert entry["source"]["url"] == str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_found_under_its_name(repository, tmp_path, monkeypatch, name):
    """huggingface/datasets#7468: the same for files, alone and in a folder of their class."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in" / name, f"{name}.jpg", jpeg(seed=1))
    write(tmp_path / "in" / "z", "1.jpg", jpeg(seed=2))
    ingest(repository, "in", "pets")
    keys = {sample["key"] for sample in open_dataset(repository, "pets")["train"]}
    assert keys == {f"{name}/{name}.jpg", "z/1.jpg"}
    ingest(repository, f"in/{name}/{name}.jpg", "one")
    assert [sample["key"] for sample in open_dataset(repository, "one")["train"]] == [f"{name}.jpg"]


def test_patterns_and_braces_still_work_where_nothing_has_their_name(repository, tmp_path):
    """huggingface/datasets#7468: the other way round."""
    for number in range(3):
        write(tmp_path / "a", f"{number}.csv")
    assert ingest(repository, f"{tmp_path}/[ab]/[01].csv", "rows").num_samples == {"train": 2}
    assert ingest(repository, f"{tmp_path}/a/{{0..2}}.csv", "rows").num_samples == {"train": 3}


@pytest.mark.parametrize("place", ["folder", "class", "file", "table"])
def test_a_name_that_is_not_utf8_is_read_or_named_but_never_ends_in_a_traceback(repository, tmp_path, place):
    """streamlit/streamlit#2227: names from an old disk, in Latin-1."""
    odd = os.fsdecode(b"caf\xe9")
    source = tmp_path / (odd if place == "folder" else "in")
    write(source / (odd if place == "class" else "x"), f"{odd if place == 'file' else '0'}.jpg", jpeg(seed=1))
    if place == "table":
        source = write(tmp_path / "rows", f"{odd}.csv")
    if place == "folder":
        assert ingest(repository, str(source), "pets").num_samples == {"train": 1}
        return
    with pytest.raises(DatasvcError, match=r"(?i)caf\\udce9.*not UTF-8"):
        ingest(repository, str(source), "pets")


def test_a_repository_may_lie_under_any_name(tmp_path):
    """huggingface/datasets#7468: a repository in a folder that is not UTF-8, or looks like a pattern."""
    for name in (os.fsdecode(b"caf\xe9"), "[a]*"):
        path = Path(tmp_path, name)
        ingest(Repository.create(str(path)), [{"key": "a", "x": 1}], "rows")
        assert len(open_dataset(Repository.open(str(path)), "rows")["train"]) == 1


def test_a_repository_is_opened_by_a_path_object_too(tmp_path):
    """ANCPLabOldenburg/ancp-bids#98: `str(path)` works, and the path itself ends in an AttributeError."""
    datasvc.ingest([{"key": "a", "x": 1}], "rows", repo=tmp_path / "repo")
    assert len(datasvc.open(tmp_path / "repo").dataset("rows")["train"]) == 1

"""The examples of sources: the same each time, and each is what it says it is."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.shards.sources.choose import FORMATS, choose_format, open_source
from datasvc.shards.sources.common.options import SourceOptions

ROOT = Path(__file__).parents[2]
FORMAT_OF = {
    "folder": "image-folder",
    "flat": "image-folder",
    "imagenet": "imagenet",
    "webdataset": "webdataset",
    "webdataset-compressed": "webdataset",
    "parquet": "parquet",
    "arrow": "arrow",
    "csv": "csv",
    "json-lines": "json-lines",
    "huggingface": "huggingface",
    "huggingface-hub": "parquet",
    "lmdb": "lmdb",
    "lmdb-pixels": "lmdb",
    "lmdb-plain": "lmdb",
    "tfrecord": "tfrecord",
    "recordio": "mxnet",
    "mds": "mds",
    "npy": "numpy",
    "npz": "numpy",
    "text": "tokens",
}


def make_sources(*arguments):
    program = [sys.executable, ROOT / "tools" / "make_sources.py", *map(str, arguments)]
    return subprocess.run(program, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "examples"
    done = make_sources(folder, "--images", 60)
    assert done.returncode == 0, done.stderr
    return folder


def digests_of(path):
    return digests(path) if path.is_dir() else path.read_bytes()


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(examples, tmp_path):
    for seed in (0, 1):
        assert make_sources(tmp_path / str(seed), "--images", 60, "--seed", seed).returncode == 0
    assert digests(tmp_path / "0") == digests(examples)
    same = {path.name for path in examples.iterdir() if digests_of(path) == digests_of(tmp_path / "1" / path.name)}
    assert same == {"flat", "text", "text-lines", "tokenizer.json"}  # photos and texts are the same few


def test_there_are_as_many_digits_as_were_asked_for(examples):
    assert len(list((examples / "folder").rglob("*.jpg"))) == 60


@pytest.mark.parametrize("name", FORMAT_OF)
def test_each_is_chosen_right_by_what_lies_there(examples, name):
    assert choose_format(str(examples / name), SourceOptions()) == FORMAT_OF[name]


@pytest.mark.parametrize("extension", ["csv", "jsonl", "parquet"])
def test_a_manifest_makes_a_manifest_of_a_folder(examples, extension):
    options = SourceOptions(manifest=str(examples / "manifest" / f"digits.{extension}"))
    assert choose_format(str(examples / "manifest" / "images"), options) == "manifest"


def test_a_tokenizer_makes_text_of_json_lines(examples):
    options = SourceOptions(tokenizer=str(examples / "tokenizer.json"))
    assert open_source(str(examples / "text-lines"), options).kind == "tokens"
    assert open_source(str(examples / "text-lines")).kind == "json-lines"


def test_no_source_and_no_format_is_without_an_example(examples):
    shown = {path.name for path in examples.iterdir() if path.is_dir()}
    assert shown == {*FORMAT_OF, "manifest", "text-lines"}
    # Of scenes, sounds, videos and chats, the pages and examples/detection.py make examples.
    elsewhere = {"coco", "yolo", "voc", "audio-folder", "video-folder", "chats"}
    assert {*FORMAT_OF.values(), "manifest"} | elsewhere == {*FORMATS}


@pytest.mark.slow
def test_nothing_is_written_into_a_folder_that_holds_something(examples):
    before = digests(examples)
    done = make_sources(examples)
    assert done.returncode == 1
    assert "is not empty; name a new folder" in done.stderr
    assert digests(examples) == before


@pytest.mark.slow
def test_too_few_digits_are_refused(tmp_path):
    done = make_sources(tmp_path / "few", "--images", 12)
    assert done.returncode == 1
    assert "expected at least 60" in done.stderr
    assert not (tmp_path / "few").exists()

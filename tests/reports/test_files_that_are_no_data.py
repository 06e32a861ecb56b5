"""What lies between other people's data: files of their systems and tools, pointers, pages, unfinished downloads."""

import gzip
import io
import json
import os
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import BadSampleError, ConfigError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.ingestion.dry_run import dry_run_ingest
from datasvc.shards.sources.choose import open_source
from tests.samples import jpeg, write_folder

APPLE = b"\0\5\26\7\0\2\0\0Mac OS X        "
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4' * 64}\nsize 128345\n".encode()
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Access denied</body></html>\n"
REFUSAL = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'


@pytest.fixture
def photos(tmp_path):
    return write_folder(tmp_path / "photos", {"train": {"cat": 2, "dog": 2}})


def put(path, content=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "train/.ipynb_checkpoints/0-checkpoint.jpg",
        ".git/modules/logo.png",
        "__MACOSX/train/cat/._00000.jpg",
        "train/cat/._00000.jpg",
        "train/cat/.thumbnails/00000.jpg",
        "train/dog/@eaDir/00002.jpg/SYNOPHOTO_THUMB_M.jpg",
        "$RECYCLE.BIN/S-1-5-21/old.jpg",
        "train/cat/Thumbs.db",
        "train/cat/desktop.ini",
        "train/.DS_Store",
    ],
)
def test_files_of_the_system_and_of_tools_change_neither_classes_nor_samples(repository, photos, name):
    """pytorch/vision#2831, open-mmlab/mmpretrain#507, tensorflow/tensorflow#46595: a hidden folder was class 0."""
    put(photos / name, APPLE if "._" in name else jpeg(seed=99))
    done = ingest(repository, str(photos), "pets")
    train = open_dataset(repository, "pets")["train"]
    assert train.classes == ("cat", "dog")
    assert done.num_samples == {"train": 4}
    assert [label.split(" ")[0] for label in done.ignored] == ["hidden"], done.ignored
    assert sum(done.ignored.values()) == 1


def test_names_of_cameras_and_classes_may_begin_with_an_underscore(repository, tmp_path):
    """LCAV/pyroomacoustics#29: the class `_background_noise_` of Speech Commands; cameras write `_DSC0001.JPG`."""
    put(tmp_path / "a/_noise_/_DSC0001.JPG", jpeg(seed=1))
    put(tmp_path / "a/cat/_MG_0002.JPG", jpeg(seed=2))
    ingest(repository, str(tmp_path / "a"), "pets")
    assert {sample["key"] for sample in open_dataset(repository, "pets")["train"]} == {
        "_noise_/_DSC0001.JPG",
        "cat/_MG_0002.JPG",
    }


@pytest.mark.parametrize("target", ["/etc/hostname", "gone", ".."])
def test_links_in_a_hidden_folder_do_not_stop_an_ingest(repository, photos, target):
    """open-mmlab/mmpretrain#507: what a tool keeps in its own folder is not the user's data."""
    (photos / ".cache").mkdir()
    os.symlink(target, photos / ".cache" / "link.jpg")
    assert ingest(repository, str(photos), "pets").num_samples == {"train": 4}


def test_macos_files_in_a_tar_are_no_samples(repository, tmp_path):
    """libarchive/libarchive#2636, mandiant/macos-UnifiedLogs#2: bsdtar puts `._x` before each `x`."""
    hidden = ["__MACOSX/a/._0.jpg", "PaxHeaders.7/0.jpg", "a/._0.jpg", "./.cache/0.jpg", "a/._1.cls"]
    members = {**dict.fromkeys(hidden, APPLE), "a/0.jpg": jpeg(seed=1), "a/._0.cls": APPLE, "a/0.cls": b"1"}
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    ingest(repository, str(tmp_path / "train-0.tar"), "pets")
    assert [(sample["key"], sample["label"]) for sample in open_dataset(repository, "pets")["train"]] == [("a/0", 1)]


@pytest.mark.parametrize("log", ["_delta_log", ".hoodie", "metadata"])
@pytest.mark.parametrize("below", ["", "data", "data/day=1", "data/day=1/part-0.parquet", "data/day=1/*.parquet"])
def test_a_table_whose_log_says_which_rows_are_valid_is_no_folder_of_parquet_files(tmp_path, log, below):
    """dlt-hub/dlt#1693, jeppe742/DeltaLakeReader#13, apache/iceberg#7804, apache/hudi#715: removed rows came back."""
    folder = tmp_path / "table" / "data" / "day=1"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2]}), folder / "part-0.parquet")
    table = folder.parents[1] if log == "metadata" or not below else folder.parent
    put(table / log / "00000.metadata.json", b"{}")
    with pytest.raises(ConfigError, match=r"is an? (Delta|Hudi|Iceberg) table.*write them as Parquet"):
        open_source(str(tmp_path / "table" / below))


def test_a_folder_called_metadata_is_no_table(tmp_path):
    """apache/iceberg#7804: only metadata files of Iceberg make a folder a table."""
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    put(tmp_path / "metadata" / "notes.md", b"x")
    assert open_source(str(tmp_path)).ignored == {".md": 1}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["train-00000-of-00003", "train-00002-of-00003"], "00001"),
        (["train-00001-of-00003-0123456789abcdef", "train-00000-of-00003-123456789abcdef0"], "00002"),
        (["a_1_of_3", "a_3_of_3"], "00002"),
        (["train-00000-of-00001", "val-00001-of-00002"], "00000"),
    ],
)
def test_a_numbered_file_that_is_missing_is_named(tmp_path, names, missing):
    """mlcommons/training#837, rom1504/img2dataset#174: 1 of 1,024 files was not there, and the loss looked well."""
    for name in names:
        pq.write_table(pa.table({"id": [1]}), tmp_path / f"{name}.parquet")
    with pytest.raises(ConfigError, match=rf"announces \d files, of which 1 are missing, such as number {missing}"):
        dry_run_ingest(None, str(tmp_path), "rows")
    # A part of the files is a choice of the user if the names are given.
    open_source(str(tmp_path / f"{{{','.join(names)}}}.parquet"))
    open_source(str(tmp_path / f"{names[0]}.parquet"))


def test_numbers_from_one_and_files_without_samples_are_complete(tmp_path):
    """mlcommons/training#837: the other way round, nothing is missing here."""
    for number in (1, 2, 3):
        put(tmp_path / f"part-{number}-of-3.csv", b"x\n1\n" if number < 3 else b"")
    assert open_source(str(tmp_path)).ignored == {"(empty)": 1}


@pytest.mark.parametrize("rest", ["b.csv.part", "b.csv.crdownload", "a.csv.aria2", "_temporary/0/part-0.csv"])
def test_a_rest_of_a_download_or_job_is_named(tmp_path, rest):
    """cyberrumor/ammo#14, openml/openml.org#377: the data are incomplete, though all that is there reads well."""
    put(tmp_path / "a.csv", b"x\n1\n")
    put(tmp_path / rest, b"x\n2")
    with pytest.raises(ConfigError, match=r"unfinished|not finished"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["a.csv", "a.jsonl", "a.parquet", "a.arrow", "a.tar", "a.tfrecord", "a.rec", "a.npy", "a.csv.gz"]
)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (POINTER, "git lfs pull"),
        (b"/annex/objects/SHA256E-s12--ab.csv\n", "git annex get"),
        (PAGE, "a web page"),
        (b"\xef\xbb\xbf\n<html lang=en>", "a web page"),
        (REFUSAL, "error message of an object store"),
    ],
)
def test_a_pointer_or_an_error_page_is_no_data(repository, tmp_path, name, content, says):
    """benedekrozemberczki/datasets#10, NVIDIA/Isaac-GR00T#58: a pointer of three lines became three samples."""
    put(tmp_path / "a" / name, content)
    with pytest.raises(ConfigError, match=says):
        ingest(repository, str(tmp_path / "a"), "rows")


def test_the_second_file_is_looked_at_as_well(repository, tmp_path):
    """NVIDIA/Isaac-GR00T#58: one of many files was not downloaded."""
    put(tmp_path / "a" / "a.jsonl", b'{"x": 1}\n')
    put(tmp_path / "a" / "b.jsonl", POINTER)
    with pytest.raises(ConfigError, match=r"b\.jsonl is a pointer of Git LFS"):
        ingest(repository, str(tmp_path / "a"), "rows")


def test_pointers_in_place_of_images_and_zeros_in_place_of_rows_are_named(repository, photos, tmp_path):
    """NVIDIA/Isaac-GR00T#58, nullptrlabs/pgmodeler#766: pictures were pointers, and rows zeros after a power cut."""
    put(photos / "train" / "cat" / "0.jpg", POINTER)
    with pytest.raises(BadSampleError, match="git lfs pull"):
        ingest(repository, str(photos), "pets")
    put(tmp_path / "a" / "a.csv", bytes(4000))
    with pytest.raises(ConfigError, match="full of zero bytes"):
        ingest(repository, str(tmp_path / "a"), "rows")


def test_pages_may_be_documents(tmp_path):
    """A table may hold web pages; only a file that is one is refused."""
    put(tmp_path / "a.csv.gz", gzip.compress(b"page\n<html>\n"))
    assert open_source(str(tmp_path)).schema.names == ["key", "page"]


def test_a_folder_of_tensorflow_datasets_is_read_as_tfrecord(tmp_path):
    """`dataset_info.json` beside TFRecord files is not that of Hugging Face."""
    from tests.shards.sources.records.test_tfrecord import numbers, write

    write(tmp_path / "mnist-train.tfrecord-00000-of-00001", numbers(3))
    put(tmp_path / "dataset_info.json", json.dumps({"name": "mnist"}).encode())
    put(tmp_path / "features.json", b"{}")
    assert open_source(str(tmp_path)).kind == "tfrecord"


def test_a_notebooks_copy_of_a_table_is_not_ingested_with_it(repository, tmp_path):
    """pytorch/vision#2831: the same for tables and arrays."""
    put(tmp_path / "a" / "a.csv", b"x\n1\n")
    put(tmp_path / "a" / ".ipynb_checkpoints" / "a-checkpoint.csv", b"x\n1\n")
    put(tmp_path / "a" / "__MACOSX" / "._a.json", APPLE)
    done = ingest(repository, str(tmp_path / "a"), "rows")
    assert done.num_samples == {"train": 1}
    assert done.ignored == {"hidden .ipynb_checkpoints/": 1, "hidden __MACOSX/": 1}
    np.save(tmp_path / "x.npy", np.arange(3))
    np.save(tmp_path / "._x.npy", np.arange(2))
    assert ingest(repository, str(tmp_path / "*.npy"), "arrays").num_samples == {"train": 3}

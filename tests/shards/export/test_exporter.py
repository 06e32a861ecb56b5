"""What all formats have in common: what is exported, where to, and what becomes of an export that fails."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.shards import open_dataset
from datasvc.shards.export import FORMATS
from datasvc.shards.format.schema import shard_schema
from tests.progress import RecordedProgress
from tests.shards.export import test_webdataset
from tests.shards.export.contents import CLASSES, KEY_FIELD, exported, files, write_photos
from tests.shards.written_versions import describe_table, write_table

ROOT = Path(__file__).parents[3]
# Ends itself with SIGKILL at the n-th fsync: half of them come before a file has its name, half of them after.
KILLED = """
import os, signal, sys
from datasvc.shards.export import export
from datasvc.repository import Repository

real, calls = os.fsync, 0

def fsync(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)

if __name__ == "__main__":
    os.fsync = fsync
    export(Repository.open(sys.argv[2]), *sys.argv[3:6], workers=int(sys.argv[6]))
"""


def run_killed(calls, dataset, destination, export_format, workers=1, *, script):
    arguments = [calls, dataset.repository.url, dataset.resolved, destination, export_format, workers]
    script.write_text(KILLED)
    # Output is read until the last process that holds it has ended, so workers that live on would hang this.
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def summary_of(folder):
    return json.loads((Path(folder) / "datasvc-export.json").read_text())


def test_a_column_that_old_shards_lack_is_null_in_them(repository, tmp_path):
    old = shard_schema([KEY_FIELD])
    new = shard_schema([KEY_FIELD, pa.field("text", pa.string())])
    before = write_table(repository.objects, [[{"key": "a"}]], old)
    after = write_table(repository.objects, [[{"key": "b", "text": "x"}]], new)
    both = dataclasses.replace(after, rows=pa.concat_tables([before.rows, after.rows]))
    splits = {"train": describe_table(repository.objects, both)}
    repository.versions("datasets", "grown").append(lambda _head: {"splits": splits})
    exported(open_dataset(repository, "grown"), tmp_path / "out", "parquet")
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [table.to_pylist() for table in tables] == [[{"key": "a", "text": None}], [{"key": "b", "text": "x"}]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "export_format",
    [name if name == "webdataset" else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS],
)
def test_any_number_of_workers_writes_the_same_files(repository, tmp_path, export_format):
    dataset = write_photos(repository, [f"{number}" for number in range(20)], shards=5, boxed=export_format == "coco")
    progress = RecordedProgress()
    reports = [
        exported(dataset, tmp_path / f"{workers}", export_format, workers=workers, progress=progress)
        for workers in (1, 3)
    ]
    assert files(tmp_path / "1") == files(tmp_path / "3")
    assert reports[0].splits == reports[1].splits
    size_bytes = sum(split.table.size_bytes for split in dataset.values())
    assert (progress.totals, progress.total) == ([size_bytes, size_bytes], 2 * size_bytes)


def test_the_summary_describes_the_exported_splits(repository, tmp_path):
    dataset = write_photos(repository)
    exported(dataset, tmp_path / "out", "webdataset", split="val")
    assert summary_of(tmp_path / "out") == {
        "version": "photos@1",
        "format": "webdataset",
        "tables": {"val": dataset["val"].digest},
        "splits": {
            "val": {
                "samples": 2,
                "files": 1,
                "bytes": (tmp_path / "out" / "val-000000.tar").stat().st_size,
                "columns": {
                    "key": "string", "image": "large_binary", "width": "int32", "height": "int32", "label": "int32"
                },
                "classes": list(CLASSES),
            }
        },
    }  # fmt: skip
    assert sorted(files(tmp_path / "out")) == ["datasvc-export.json", "val-000000.tar"]


def test_a_file_is_no_folder(repository, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        exported(write_photos(repository), tmp_path / "out", "webdataset")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_killed_tidying_up_is_finished(repository, tmp_path, monkeypatch):
    def interrupted(_self):
        raise KeyboardInterrupt

    dataset = write_photos(repository)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("datasvc.shards.export.records.ExportRecords.tidy", interrupted)
        exported(dataset, tmp_path / "out", "folder")
    for path in (tmp_path / "out" / ".datasvc-export").iterdir():
        if path.suffix != ".json":
            path.unlink()
    report = exported(dataset, tmp_path / "out", "folder")
    assert report.splits == exported(dataset, tmp_path / "other", "folder").splits
    assert files(tmp_path / "out") == files(tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    "export_format",
    [each if each == "webdataset" else pytest.param(each, marks=pytest.mark.slow) for each in FORMATS],
)
def test_a_killed_export_is_continued_to_the_same_files(repository, tmp_path, export_format):
    dataset = write_photos(
        repository, [f"cat/{number}" for number in range(9)], shards=3, boxed=export_format == "coco"
    )
    runs = 0
    while True:
        done = run_killed(6 + 5 * runs, dataset, tmp_path / "out", export_format, script=tmp_path / "run.py")
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        assert not (tmp_path / "out" / "datasvc-export.json").exists() or (tmp_path / "out/.datasvc-export").exists()
        runs += 1
    assert runs > 1
    exported(dataset, tmp_path / "whole", export_format)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_finished_shards_are_not_written_again(repository, tmp_path):
    dataset = write_photos(repository, [f"{number}" for number in range(9)], shards=3)
    run_killed(14, dataset, tmp_path / "out", "webdataset", script=tmp_path / "run.py")
    recorded = {path.stem for path in (tmp_path / "out" / ".datasvc-export").glob("train-*.json")}
    assert 0 < len(recorded) < 3
    before = {name: (tmp_path / "out" / f"{name}.tar").stat().st_mtime_ns for name in recorded}
    exported(dataset, tmp_path / "out", "webdataset")
    assert {name: (tmp_path / "out" / f"{name}.tar").stat().st_mtime_ns for name in recorded} == before


def test_an_unfinished_export_is_gone_on_with_only_by_the_same(repository, tmp_path):
    dataset = write_photos(repository)
    run_killed(9, dataset, tmp_path / "out", "webdataset", script=tmp_path / "run.py")
    for options in ({"export_format": "parquet"}, {"export_format": "webdataset", "split": "train"}):
        with pytest.raises(
            ConfigError, match="unfinished export of photos@1 as webdataset, splits train, val; repeat"
        ):
            exported(dataset, tmp_path / "out", **options)
    exported(dataset, tmp_path / "out", "webdataset")


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(repository, tmp_path):
    dataset = write_photos(repository, [f"{number}" for number in range(40)], shards=20)
    done = run_killed(12, dataset, tmp_path / "out", "webdataset", 2, script=tmp_path / "run.py")
    assert done.returncode == -9
    exported(dataset, tmp_path / "out", "webdataset", workers=2)
    test_webdataset.check(dataset, tmp_path / "out")


@pytest.mark.slow
def test_an_export_continues_after_the_error_of_a_killed_worker(repository, tmp_path, monkeypatch):
    dataset = write_photos(repository, [f"{number}" for number in range(20)], shards=10)
    (tmp_path / "site").mkdir()
    # Python runs this file when a worker starts.
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\nreal, calls = os.fsync, []\n"
        "def fsync(descriptor):\n    calls.append(0)\n"
        "    os.kill(os.getpid(), 9) if len(calls) > 2 else real(descriptor)\n"
        "os.fsync = fsync\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "site"))
        with pytest.raises(
            UnavailableError,
            match=r"a worker process was killed.*it continues with the shards that are not yet written",
        ):
            exported(dataset, tmp_path / "out", "webdataset", workers=2)
    assert not (tmp_path / "out" / "datasvc-export.json").exists()
    exported(dataset, tmp_path / "out", "webdataset", workers=2)
    test_webdataset.check(dataset, tmp_path / "out")


def test_two_exports_at_once_do_not_meet_in_one_folder(repository, tmp_path):
    dataset = write_photos(repository)
    refused = []

    def export_again():
        with pytest.raises(ConflictError, match="another process is exporting") as caught:
            exported(dataset, tmp_path / "out", "webdataset")
        refused.append(caught)

    exported(dataset, tmp_path / "out", "webdataset", progress=RecordedProgress(on_advance=export_again))
    assert len(refused) == 3
    test_webdataset.check(dataset, tmp_path / "out")


def test_a_disk_that_is_full_when_files_are_synced_is_an_error_too(repository, tmp_path, monkeypatch):
    dataset = write_photos(repository)

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(UnavailableError, match="No space left on device"):
            exported(dataset, tmp_path / "out", "webdataset")
    exported(dataset, tmp_path / "out", "webdataset")
    test_webdataset.check(dataset, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"export_format": "zarr"},
            ConfigError,
            "cannot export as 'zarr'; expected one of webdataset, parquet, mds, lmdb",
        ),
        ({"export_format": "mds", "split": "test"}, NotFoundError, "has no split 'test'; it has: train, val"),
        ({"export_format": "mds", "workers": 0}, ConfigError, "at least 1 worker"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_made(repository, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        exported(write_photos(repository), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_summary_that_is_no_json_is_refused(repository, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "datasvc-export.json").write_text("{")
    with pytest.raises(CorruptDataError, match="is not a JSON object"):
        exported(write_photos(repository), tmp_path / "out", "webdataset")

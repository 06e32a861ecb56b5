"""What a disk, a source or an attacker can do to an ingest: an error that says so, and nothing half-made."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError, DatasvcError, UnavailableError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.samples import class_sorted, jpeg, write_folder, write_tars

ROOT = Path(__file__).parents[2]


def leftovers(repository):
    """Return temporary files below a repository, and versions."""
    found = [str(path) for path in Path(repository.url).rglob(".tmp-*")]
    return found + repository.names("datasets")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 1 MiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["listed", "streamed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_ends_an_ingest_that_continues_when_there_is_room(small_disk, tmp_path, kind, workers):
    if kind == "listed":
        source = write_folder(tmp_path / "source", {"train": {"a": 30}})
        for path in source.rglob("*.jpg"):
            path.write_bytes(path.read_bytes() + os.urandom(60_000) + b"\xff\xd9")
    else:
        contents = {f"{number}.bin": os.urandom(60_000) for number in range(30)}
        source = write_tars(tmp_path / "tars", contents, per_tar=3)
    repository = Repository.create(str(small_disk / "repo"))
    with pytest.raises(UnavailableError, match="No space left on device"):
        ingest(repository, str(source), "pets", shard_bytes=200_000, workers=workers)
    assert leftovers(repository) == []
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    report = ingest(repository, str(source), "pets", shard_bytes=200_000, workers=workers)
    assert report.num_samples == {"train": 30}
    assert sum(1 for _ in open_dataset(repository, "pets")["train"]) == 30


def test_a_truncated_tar_is_named_and_what_is_whole_before_it_may_be_kept(repository, tmp_path):
    source = write_tars(tmp_path / "tars", class_sorted(40, 4), per_tar=40)
    path = source / "train-000001.tar"
    path.write_bytes(path.read_bytes()[: 30 * 512])
    with pytest.raises(BadSampleError, match=r"train-000001\.tar"):
        ingest(repository, str(source), "pets")
    report = ingest(repository, str(source), "pets", on_bad="skip")
    assert 20 < report.num_samples["train"] < 40
    assert len(report.bad) == 1


def test_an_image_that_would_fill_the_memory_is_a_bad_sample(repository, folder):
    buffer = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(buffer, "PNG")
    (folder / "train" / "a" / "bomb.png").write_bytes(buffer.getvalue())
    with pytest.raises(BadSampleError, match=r"train/a/bomb\.png: .*decompression bomb"):
        ingest(repository, str(folder), "pets")


@pytest.mark.slow
def test_a_compressed_tar_that_unfolds_without_end_needs_no_memory_to_refuse(repository, tmp_path):
    program = (
        "import re, resource, sys\n"
        "from datasvc.repository import Repository\n"
        "from datasvc.shards import ingest\n"
        "try:\n"
        "    ingest(Repository.open(sys.argv[1]), sys.argv[2], 'pets', on_bad='skip')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    path = tmp_path / "bomb.tar.gz"
    member = tarfile.TarInfo("0.bin")
    member.size = 2 << 30
    with tarfile.open(path, "w:gz", compresslevel=1) as packed:
        packed.addfile(member, Zeros(member.size))
    words = [sys.executable, "-c", program, repository.url, str(path)]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert said[0] in {"BadSampleError", "NotFoundError"}  # no sample is left
    assert int(said[1]) < 600_000


class Zeros(io.RawIOBase):
    """So many zeros as a file."""

    def __init__(self, size):
        self._left = size

    def read(self, count=-1):
        count = min(count, self._left)
        self._left -= count
        return bytes(count)


@pytest.mark.parametrize("name", ["../outside.jpg", "/etc/outside.jpg", "a/../../outside.jpg"])
def test_a_member_that_climbs_out_of_its_tar_is_a_bad_sample_and_nothing_is_written_there(repository, tmp_path, name):
    source = write_tars(tmp_path / "tars", {"0.jpg": jpeg(), name: jpeg(seed=1)}, per_tar=2)
    with pytest.raises(BadSampleError, match="outside"):
        ingest(repository, str(source), "pets")
    assert not list(tmp_path.rglob("outside.jpg"))


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_out_of_the_source_is_refused(repository, folder, tmp_path, what):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret.jpg").write_bytes(jpeg())
    target = tmp_path / "private" if what == "folder" else tmp_path / "private" / "secret.jpg"
    (folder / "train" / "a" / f"link{'' if what == 'folder' else '.jpg'}").symlink_to(target)
    with pytest.raises(ConfigError, match="is a link out of the source, to "):
        ingest(repository, str(folder), "pets")


def test_a_link_within_the_source_is_a_file_like_others(repository, folder):
    (folder / "train" / "a" / "again.jpg").symlink_to(folder / "train" / "b" / "00007.jpg")
    assert ingest(repository, str(folder), "pets").num_samples["train"] == 21


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", b"PAR1 is not all it takes"), ("a.arrow", b"ARROW1"), ("a.csv", b""), ("a.jsonl", b"[1, 2\n"),
        ("a.tar", b"\0" * 100), ("a.tar", b"no tar" * 200), ("a.tar.gz", b"no gzip"), ("a.tar.zst", b"no zstd"),
        ("a.npy", b"\x93NUMPY"), ("a.npz", b"PK"), ("a.tfrecord", b"\1\2\3"), ("a.rec", b"\1\2\3"),
        ("data.mdb", b"x" * 8192),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_its_name_says_is_an_error_that_names_it(repository, tmp_path, name, content):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).write_bytes(content)
    with pytest.raises(DatasvcError, match=r"a\.|data\.mdb|source"):
        ingest(repository, str(tmp_path / "source"), "odd", on_bad="skip")
    assert leftovers(repository) == []


def test_a_link_to_nothing_and_one_in_a_circle_are_refused(repository, folder):
    (folder / "train" / "a" / "gone.jpg").symlink_to("nowhere.jpg")
    with pytest.raises(ConfigError, match=r"is a link to .*, which does not exist"):
        ingest(repository, str(folder), "pets")
    (folder / "train" / "a" / "gone.jpg").unlink()
    (folder / "train" / "circle").symlink_to(folder / "train")
    with pytest.raises(ConfigError, match="is a link to one of its parent folders"):
        ingest(repository, str(folder), "pets")


def test_columns_that_change_half_way_are_refused_by_file(repository, tmp_path):
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "tables" / "0.parquet")
    pq.write_table(pa.table({"a": ["one"], "b": ["x"]}), tmp_path / "tables" / "1.parquet")
    with pytest.raises(ConfigError, match=r"1\.parquet"):
        ingest(repository, str(tmp_path / "tables"), "tables")
    assert leftovers(repository) == []


def test_arrays_of_objects_are_refused_unread(repository, tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(DatasvcError, match=r"x\.npy"):
        ingest(repository, str(tmp_path / "x.npy"), "odd")

"""What every export does; each format is a subclass of `ExportLaws` of a few lines, with a foreign reader of it."""

import secrets
import subprocess

import fsspec
import pytest

from datasvc.errors import ConfigError, CorruptDataError, UnavailableError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.format.schema import image_schema
from datasvc.shards.versions.delete import delete
from tests.shards.export.contents import (
    CLASSES,
    ODD_KEYS,
    digests,
    exported,
    files,
    photos,
    version_digests,
    write_photos,
    write_rich,
    write_tokens,
)
from tests.shards.written_versions import write_version

SUMMARY = "datasvc-export.json"


class ExportLaws:
    """The laws of exports. A subclass sets `format`, gives `read`, and says what its format cannot hold."""

    format = ""
    # Keys of any kind that the format gives back exactly; whether samples come back in the order of their shards.
    keys, keeps_order = ODD_KEYS, True
    is_local_only = False
    # The message with which columns of any kind, or blocks of tokens, are refused; None: they come back.
    refuses_rich = refuses_tokens = None
    # Values of the samples with columns of any kind that the format has no null for.
    rich_values: dict = {}  # noqa: RUF012 - never changed

    def read(self, folder, split):
        """Return the samples of an exported split as dicts by column, as a reader of others finds them."""
        raise NotImplementedError

    def check(self, dataset, folder):
        for split in dataset.values():
            samples = self.read(folder, split)
            assert digests(samples, split.table.sample_schema) == version_digests(split)
            if self.keeps_order:
                assert [sample["key"] for sample in samples] == [sample["key"] for sample in split]

    def check_round_trip(self, dataset, folder):
        report = exported(dataset, folder, self.format)
        self.check(dataset, folder)
        assert {name: split.num_samples for name, split in report.splits.items()} == {
            name: len(split) for name, split in dataset.items()
        }
        written = [path for path in folder.rglob("*") if path.is_file() and path.name != SUMMARY]
        assert sum(split.num_files for split in report.splits.values()) == len(written)
        assert sum(split.size_bytes for split in report.splits.values()) == sum(p.stat().st_size for p in written)
        return report

    def test_images_labels_and_keys_of_any_kind_come_back_and_nothing_climbs(self, repository, tmp_path):
        self.check_round_trip(write_photos(repository, list(self.keys)), tmp_path / "a" / "b" / "out")
        outside = [path for path in (tmp_path / "a").rglob("*") if "out" not in path.parts and path.is_file()]
        assert outside == []

    def test_columns_of_any_kind_come_back_or_are_refused_before_anything_is_made(self, repository, tmp_path):
        self.check_or_refuse(write_rich(repository, **self.rich_values), tmp_path / "out", self.refuses_rich)

    def test_blocks_of_tokens_come_back_or_are_refused_before_anything_is_made(self, repository, tmp_path):
        self.check_or_refuse(write_tokens(repository), tmp_path / "out", self.refuses_tokens)

    def check_or_refuse(self, dataset, folder, refusal):
        if refusal is None:
            self.check_round_trip(dataset, folder)
            return
        with pytest.raises(ConfigError, match=f"{refusal}.*formats that can: .*webdataset|parquet"):
            exported(dataset, folder, self.format)
        assert not folder.exists()

    def test_an_export_is_ingested_to_the_same_samples(self, repository, tmp_path):
        keys = [f"{CLASSES[number % 2]}/{number:03d}.jpg" for number in range(7)]
        dataset = write_photos(repository, keys)
        exported(dataset, tmp_path / "out", self.format)
        other = Repository.create(str(tmp_path / "other"))
        ingest(other, str(tmp_path / "out"), "back")
        back = open_dataset(other, "back")
        for name, split in dataset.items():
            images = [sorted((sample["image"], sample["label"]) for sample in each) for each in (back[name], split)]
            assert images[0] == images[1]

    def test_deleted_samples_are_left_out(self, repository, tmp_path):
        first = write_photos(repository, [f"cat/{number:02d}" for number in range(12)], shards=4)
        gone = [f"cat/{number:02d}" for number in (0, 3, 4, 5, 11)]  # the whole of the second shard
        delete(repository, "photos", keys=gone)
        for name, dataset in (("after", open_dataset(repository, "photos")), ("before", first)):
            exported(dataset, tmp_path / name, self.format)
            self.check(dataset, tmp_path / name)

    def test_a_split_without_samples_is_no_trouble(self, repository, tmp_path):
        write_version(repository, "none", {"train": [], "val": [photos(["a"])]}, image_schema(labelled=True), CLASSES)
        report = exported(open_dataset(repository, "none"), tmp_path / "out", self.format, workers=2)
        assert (report.splits["train"].num_samples, report.splits["val"].num_samples) == (0, 1)

    @pytest.mark.parametrize("store", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
    def test_a_url_gets_the_same_files_as_a_folder(self, request, repository, tmp_path, store):
        base = "memory://" if store == "memory" else f"{request.getfixturevalue('s3_bucket')}/"
        url, dataset = f"{base}{secrets.token_hex(8)}/out", write_photos(repository)
        if self.is_local_only:
            with pytest.raises(ConfigError, match=f"{self.format} is written to local folders only"):
                exported(dataset, url, self.format)
            return
        exported(dataset, tmp_path / "out", self.format)
        exported(dataset, url, self.format, workers=2)
        file_system, root = fsspec.core.url_to_fs(url)
        root = root.rstrip("/")
        found = {path[len(root) + 1 :]: file_system.cat_file(path) for path in file_system.find(root)}
        assert found == {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")}
        with pytest.raises(ConfigError, match="holds a finished export"):
            exported(dataset, url, self.format)

    def test_a_folder_with_other_files_stays_unchanged(self, repository, tmp_path):
        dataset = write_photos(repository)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"is not empty \(notes.txt\), and an export overwrites nothing"):
            exported(dataset, tmp_path / "out", self.format)
        exported(dataset, tmp_path / "done", self.format)
        before = files(tmp_path / "done")
        with pytest.raises(ConfigError, match="holds a finished export"):
            exported(dataset, tmp_path / "done", self.format)
        assert files(tmp_path / "out").keys() == {"notes.txt"}
        assert files(tmp_path / "done") == before

    @pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_a_corrupt_shard_stops_the_export(self, repository, tmp_path, workers):
        dataset = write_photos(repository, [f"{number}" for number in range(9)], shards=3)
        damaged = dataset["train"].table.shard(1).digest
        path = repository.objects.local_path(damaged)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CorruptDataError, match=damaged):
            exported(dataset, tmp_path / "out", self.format, workers=workers)
        assert not (tmp_path / "out" / SUMMARY).exists()
        assert not list((tmp_path / "out").rglob(".tmp-*"))
        assert not list((tmp_path / "out").rglob("index.json"))

    @pytest.fixture
    def small_disk(self, tmp_path):
        """A folder with room for 64 kB."""
        folder = tmp_path / "disk"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        if subprocess.run(words, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount a small file system")
        yield folder
        subprocess.run(["umount", folder], check=True)

    def test_a_full_disk_is_an_error_and_leaves_nothing_that_looks_complete(self, repository, small_disk):
        dataset = write_photos(repository, [f"{number}" for number in range(60)], shards=6)
        with pytest.raises(UnavailableError, match=r"No space left on device|; 0 bytes are free"):
            exported(dataset, small_disk / "out", self.format)
        assert not (small_disk / "out" / SUMMARY).exists()
        assert not list(small_disk.rglob(".tmp-*"))

"""What every source does; each is a subclass of `StreamedSourceLaws` or `ListedSourceLaws` of a few lines."""

import random
import re

import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.ingestion.dry_run import dry_run_ingest
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.choose import open_source
from datasvc.shards.sources.common.files import FileReader
from datasvc.testing import FaultyStore, check_source
from tests.shards.sources import reading

REFUSALS = (ConfigError, CorruptDataError, NotFoundError)
TRAIN, VAL = range(60), range(60, 75)


class SourceLaws:
    """The laws of all sources. A subclass sets `source`, gives `write`, and says what its format lacks."""

    # The class of the source, and options without which it reads nothing.
    source = None
    options: dict = {}  # noqa: RUF012 - never changed
    splits = ("train", "val")
    # Whether files on other machines can be read.
    is_remote = True
    # `ignored` of a source with a file `notes.md`, which it has no use for.
    ignored = {".md": 1}  # noqa: RUF012 - never changed

    def write(self, folder, numbers):
        """Write samples that hold `numbers`, in this order, below `folder`."""
        raise NotImplementedError

    def write_splits(self, root, splits):
        for split, numbers in splits.items():
            (root / split).mkdir(parents=True, exist_ok=True)
            self.write(root / split, numbers)

    def list(self, url, **options):
        return self.source.list(str(url), SourceOptions(**{**self.options_at(url), **options}))

    def options_at(self, url):  # noqa: ARG002 - for subclasses
        return self.options

    def one_split(self, root):
        """Return the URL of the first split alone."""
        return root / self.splits[0]

    def read(self, source):
        """Return (split, number) of the samples, and the bad samples, in the order of the source."""
        raise NotImplementedError

    @pytest.fixture
    def root(self, tmp_path):
        """A source with two splits."""
        folder = tmp_path / "source"
        self.write_splits(folder, dict(zip(self.splits, (TRAIN, VAL), strict=False)))
        return folder

    def expected(self):
        samples = zip(self.splits, (TRAIN, VAL), strict=False)
        return [(split, number) for split, numbers in samples for number in numbers]

    def test_samples_come_in_order_of_their_splits_and_the_same_at_each_listing(self, root):
        source = self.list(root)
        assert self.read(source) == self.read(self.list(root)) == (self.expected(), [])
        assert source.kind == self.source.kind
        assert source.fingerprint() == self.list(root).fingerprint()
        assert source.size_bytes > 0
        assert not source.ignored

    def test_a_remote_source_reads_as_a_local_one(self, root):
        with FaultyStore() as store:
            url = reading.to_memory(root, store.url)
            if self.is_remote:
                assert self.read(self.list(url)) == (self.expected(), [])
            else:
                with pytest.raises(ConfigError, match="copy"):
                    self.list(url)

    def test_a_store_that_fails_is_unavailable_and_its_samples_are_not_bad(self, root):
        if not self.is_remote:
            return
        with FaultyStore() as store:
            source = self.list(reading.to_memory(root, store.url))
            store.fail("read", error=OSError("503 Slow Down"))
            with pytest.raises(UnavailableError, match="503"):
                self.read(source)
            store.fail("list", error=OSError("503 Slow Down"))
            with pytest.raises(UnavailableError, match="503"):
                self.list(store.url)

    def test_the_format_is_found_by_the_names_of_files(self, root):
        options = self.options_at(root)
        assert type(open_source(str(root), SourceOptions(**options))) is self.source
        with pytest.raises(ConfigError, match="format 'nonsense' is unknown"):
            open_source(str(root), SourceOptions(**{**options, "format": "nonsense", "manifest": None}))

    def test_the_split_is_the_users_when_one_is_given(self, root):
        samples, _ = self.read(self.list(self.one_split(root), split="all"))
        assert {split for split, _ in samples} == {"all"}

    def test_another_content_is_another_fingerprint(self, tmp_path):
        for name, numbers in (("a", range(8)), ("b", range(9))):
            self.write_splits(tmp_path / name, {self.splits[0]: numbers})
        before = self.list(tmp_path / "a").fingerprint()
        (tmp_path / "a").rename(tmp_path / "old")
        (tmp_path / "b").rename(tmp_path / "a")
        assert self.list(tmp_path / "a").fingerprint() != before

    def test_a_source_without_samples_is_not_found(self, tmp_path):
        with pytest.raises(NotFoundError):
            self.list(tmp_path / "gone")
        (tmp_path / "empty").mkdir()
        with pytest.raises(NotFoundError):
            self.list(tmp_path / "empty")
        (tmp_path / "empty" / "notes.md").write_text("no samples")
        with pytest.raises(NotFoundError):
            self.list(tmp_path / "empty")

    def test_files_of_other_kinds_are_counted(self, root):
        (root / "notes.md").write_text("no samples")
        source = self.list(root)
        assert source.ignored == self.ignored
        assert self.read(source)[0] == self.expected()

    def test_a_file_that_is_gone_since_the_listing_is_not_found(self, root):
        source = self.list(root)
        for path in [path for path in root.rglob("*") if path.is_file()]:
            path.unlink()
        with pytest.raises(NotFoundError):
            self.read(source)

    def test_an_ingest_stores_the_samples_and_a_dry_run_says_how_many(self, repository, root):
        source = self.list(root)
        plan = dry_run_ingest(None, source, "made", shard_bytes=4000)
        report = ingest(repository, source, "made", shard_bytes=4000, keep_order=True)
        assert plan.num_samples.keys() == report.num_samples.keys()
        if plan.is_estimate:  # by the sizes of files, from all of them together
            assert abs(sum(plan.num_samples.values()) - sum(report.num_samples.values())) < len(self.splits)
        else:
            assert plan.num_samples == report.num_samples
        stored = open_dataset(repository, "made")
        assert stored["train"].table.sample_schema == plan.schema
        assert set(report.num_samples) == set(self.splits)
        assert sum(report.num_samples.values()) == self.num_samples(source)

    def num_samples(self, source):  # noqa: ARG002 - for subclasses
        return len(self.expected())


class StreamedSourceLaws(SourceLaws):
    """The laws of sources that are read in parts."""

    column = "number"
    # Whether `column` can give the keys: None where keys are those of the format.
    key = "number"
    # A file that is cut off is noticed wherever it is cut, not only inside of a sample.
    is_cut_noticed = True
    # What becomes of files with a flipped bit: some are refused (or samples of them are bad), some are accepted.
    refuses_flips, accepts_flips = True, True

    def numbers(self, table):
        """Return the numbers that `write` wrote."""
        return [int(value) for value in table.column(self.column).to_pylist()]

    def read(self, source):
        samples, bad = [], []
        for part in source.parts:
            table, rejected = reading.read_parts(source, [part])
            samples += [(part.split, number) for number in self.numbers(table)]
            bad += rejected
        return samples, bad

    def test_promises_of_sources_are_kept(self, root):
        assert check_source(self.list(root)).bad == []

    def test_keys_come_from_a_column_where_one_is_named(self, root):
        if self.key is None:
            return
        source = self.list(root, key=self.key)
        assert [int(key) for key in check_source(source).table.column("key").to_pylist()] == [*TRAIN, *VAL]
        assert source.fingerprint() != self.list(root).fingerprint()
        with pytest.raises(ConfigError, match="gone"):
            reading.read_all(self.list(root, key="gone"))

    def test_a_file_cut_off_anywhere_is_named_and_gives_what_is_whole_before(self, root):
        path, source = self.largest_file(root), self.list(root)
        whole = path.read_bytes()
        for length in sorted({0, 1, len(whole) - 1, *range(0, len(whole), len(whole) // 12 + 1)}):
            path.write_bytes(whole[:length])
            for read in (lambda: self.read(source), lambda: self.read(self.list(root))):
                self.check_cut(path, length, read)

    def check_cut(self, path, length, read):
        try:
            samples, bad = read()
        except REFUSALS as error:
            refusal = str(error)
        else:
            self.check_cut_samples(path, length, samples, bad)
            return
        assert path.name in refusal or path.parent.name in refusal, length

    def check_cut_samples(self, path, length, samples, bad):
        for split in self.splits:
            kept = [number for found, number in samples if found == split]
            whole = [number for found, number in self.expected() if found == split]
            # The last line of a text may itself be cut.
            num_sure = len(kept) if self.is_cut_noticed else max(0, len(kept) - 1)
            assert kept[:num_sure] == whole[:num_sure], length
        if self.is_cut_noticed and length:
            assert bad or samples == self.expected(), length  # a tar ends with zeros that nobody needs
            names = (path.name, path.parent.name)
            assert all(any(name in f"{sample.key} {sample.reason}" for name in names) for sample in bad), length

    def test_a_flipped_bit_is_an_error_or_a_value_but_never_a_crash(self, root):
        path, chosen = self.largest_file(root), random.Random(0)
        whole, refused, accepted = path.read_bytes(), 0, 0
        for offset in sorted({*range(8), *(chosen.randrange(len(whole)) for _ in range(60))}):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << chosen.randrange(8)
            path.write_bytes(flipped)
            try:
                _, bad = reading.read_all(self.list(root))
            except REFUSALS:
                refused += 1
            else:
                refused += bool(bad)
                accepted += not bad
        assert (refused > 0, accepted > 0) == (self.refuses_flips, self.accepts_flips), (refused, accepted)

    def largest_file(self, root):
        return max((path for path in root.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


class ListedSourceLaws(SourceLaws):
    """The laws of sources whose listing gives each file. What is in a file is checked by the ingest."""

    def number(self, file):
        """Return the number that `write` put into the name of a file."""
        return int(re.search(r"(\d+)\.\w+$", file.key)[1])

    def read(self, source):
        reader = FileReader(source.url)
        files = [(split, file) for split, listed in source.splits.items() for file in listed]
        assert all(len(reader.read(file.path)) == file.size_bytes for _, file in files)
        return [(split, self.number(file)) for split, file in files], []

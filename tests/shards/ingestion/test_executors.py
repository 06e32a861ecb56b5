"""Whoever builds the shards, and however often it was interrupted: the same digests, and nothing done twice."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from datasvc.api.gc import discard_referenced, list_old, sweep
from datasvc.api.referenced_objects import referenced_objects
from datasvc.errors import NotFoundError, SourceChangedError
from datasvc.repository import Repository
from datasvc.repository.logs.journal import Journal
from datasvc.shards import ingest, open_dataset
from datasvc.shards.ingestion import executors
from datasvc.shards.ingestion.ingest_commit import IngestCommit
from datasvc.shards.sources import ImageFolderSource, SourceOptions
from datasvc.shards.sources.choose import open_source
from datasvc.shards.versions.verify import verify
from tests.progress import RecordedProgress
from tests.samples import class_sorted, jpeg, write_tars
from tests.support import warm_python
from tests.support.ray_cluster import ray_cluster

ROOT = Path(__file__).parents[3]
LISTED = {"shard_bytes": 2500}
STREAMED = {"shard_bytes": 6000}


def digests(repository, ref):
    return {name: split.digest for name, split in open_dataset(repository, ref).items()}


@pytest.fixture
def tars(tmp_path):
    """480 files of 240 samples in 40 tars: several units of several shards."""
    return write_tars(tmp_path / "tars", class_sorted(240, 8), per_tar=12)


@pytest.fixture(params=["listed", "streamed"])
def source(request, folder, tars):
    """A source and the options that give it many shards."""
    return (folder, LISTED) if request.param == "listed" else (tars, STREAMED)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("workers", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_digests(tmp_path, source, workers):
    where, options = source
    one, many = (Repository.create(str(tmp_path / name)) for name in ("one", "many"))
    ingest(one, str(where), "pets", **options)
    report = ingest(many, str(where), "pets", workers=workers, **options)
    assert sum(report.num_shards.values()) > 7
    assert digests(one, "pets") == digests(many, "pets")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["listed", pytest.param("streamed", marks=pytest.mark.slow)], indirect=True)
def test_workers_that_are_spawned_give_the_same_digests(tmp_path, source, monkeypatch):
    where, options = source
    one, many = (Repository.create(str(tmp_path / name)) for name in ("one", "many"))
    ingest(one, str(where), "pets", **options)
    monkeypatch.setattr(executors, "choose_start_method", lambda **_: "spawn")
    ingest(many, str(where), "pets", workers=2, **options)
    assert digests(one, "pets") == digests(many, "pets")


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_worker_is_left_when_an_ingest_ends(repository, folder, fails):
    listed = ImageFolderSource.list(str(folder))
    if fails:
        (folder / "train" / "c" / "00012.jpg").unlink()
    threads = set(threading.enumerate())
    with pytest.raises(NotFoundError, match=r"00012\.jpg") if fails else nullcontext():
        ingest(repository, listed, "pets", workers=2, **LISTED)
    assert repository.names("datasets") == ([] if fails else ["pets"])
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) <= threads


@pytest.mark.slow
def test_ray_gives_the_same_digests_and_errors(tmp_path, source):
    pytest.importorskip("ray")
    where, options = source
    with ray_cluster():
        one, cluster = (Repository.create(str(tmp_path / name)) for name in ("one", "cluster"))
        ingest(one, str(where), "pets", **options)
        progress = RecordedProgress()
        ingest(cluster, str(where), "pets", engine="ray", workers=2, progress=progress, **options)
        assert digests(one, "pets") == digests(cluster, "pets")
        assert progress.num_samples > 0
        listed = ImageFolderSource.list(str(tmp_path / "source"))
        files = next(iter(listed.splits.values()))
        files[0] = files[0]._replace(size_bytes=files[0].size_bytes + 1)
        with pytest.raises(SourceChangedError):
            ingest(cluster, listed, "other", engine="ray", workers=2)


def test_class_sorted_parts_are_mixed_within_each_shard(repository, tars):
    ingest(repository, str(tars), "pets", shard_bytes=20_000)
    split = open_dataset(repository, "pets")["train"]
    for number in range(split.table.num_shards):
        labels = split.origin.open_shard(split.table.shard(number)).values("label")
        assert len(labels) < 10 or len(set(labels.tolist())) >= 3


def test_a_fork_is_only_chosen_where_nothing_can_be_copied_half_way():
    code = (
        "import threading; from datasvc.shards.ingestion.executors import choose_start_method as choose\n"
        "print(choose(is_local=True), choose(is_local=False))\n"
        "done = threading.Event(); threading.Thread(target=done.wait).start()\n"
        "print(choose(is_local=True)); done.set()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["fork", "spawn", "spawn"]


INTERRUPTED = """
import os, signal, sys
from datasvc.repository import Repository
from datasvc.repository.logs.journal import Journal
from datasvc.shards import ingest
after = int(sys.argv[3])
real = Journal.write
def write(self, name, content):
    global after
    real(self, name, content)
    after -= 1
    if after == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.write = write
ingest(Repository.open(sys.argv[1]), sys.argv[2], "pets", shard_bytes=int(sys.argv[4]))
"""


def interrupt(repository, where, options, *, after):
    """Kill an ingest right after its `after`-th record in the journal."""
    arguments = map(str, (repository.url, where, after, options["shard_bytes"]))
    words = [warm_python.command(), "-c", INTERRUPTED, *arguments]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -9


def stored(repository):
    """Return when each object was made, by inode: a file that is written again has another."""
    return {path.name: path.stat().st_ino for path in Path(repository.url, "objects").rglob("*") if path.is_file()}


@pytest.mark.parametrize("after", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5))])
def test_an_interrupted_ingest_continues_and_builds_no_recorded_shard_again(tmp_path, source, after):
    where, options = source
    reference, repository = (Repository.create(str(tmp_path / name)) for name in ("reference", "killed"))
    whole = ingest(reference, str(where), "pets", **options)
    interrupt(repository, where, options, after=after)
    before = stored(repository)
    report = ingest(repository, str(where), "pets", **options)
    assert digests(repository, "pets") == digests(reference, "pets")
    assert sum(whole.num_shards.values()) > report.num_resumed >= after - 1  # a unit's own record may be among them
    after_all = stored(repository)
    kept = {name for name, inode in before.items() if after_all.get(name) == inode}
    assert len(kept) >= 2 * (after - 1)  # each shard and its index
    assert not (Path(repository.url) / "journal").exists() or not os.listdir(Path(repository.url) / "journal")


def test_a_second_run_after_a_commit_that_was_killed_before_its_end_commits_nothing_more(tmp_path, folder):
    repository = Repository.create(str(tmp_path / "repo"))
    program = INTERRUPTED.replace("Journal.write = write", "Journal.remove = lambda self: os.kill(os.getpid(), 9)")
    # Journal.begin removes what is left of another state of the source first: nothing, here.
    program = program.replace("ingest(Repo", "Journal.remove, end = (lambda self: None), Journal.remove\n"
                              "begin = Journal.begin\n"
                              "def begun(self):\n"
                              "    found = begin(self); Journal.remove = end; return found\n"
                              "Journal.begin = begun\ningest(Repo")  # fmt: skip
    words = [warm_python.command(), "-c", program, repository.url, str(folder), "0", "2500"]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -9
    assert [entry.number for entry in repository.entries("datasets", "pets")] == [1]
    assert str(ingest(repository, str(folder), "pets", **LISTED).version) == "pets@1"
    assert str(ingest(repository, str(folder), "pets", **LISTED).version) == "pets@2"


def test_a_source_that_changed_since_an_interruption_is_ingested_from_its_start(repository, folder):
    interrupt(repository, folder, LISTED, after=2)
    (folder / "train" / "a" / "new.jpg").write_bytes(jpeg(seed=77))
    report = ingest(repository, str(folder), "pets", **LISTED)
    assert report.has_source_changed
    assert report.num_resumed == 0
    assert "a/new.jpg" in {sample["key"] for sample in open_dataset(repository, "pets")["train"]}


def test_a_table_that_changes_while_it_is_ingested_is_noticed(repository, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a\n1\n", encoding="utf-8")
    listed = open_source(str(path))
    path.write_text("a\n1\n2\n", encoding="utf-8")
    with pytest.raises(SourceChangedError, match="nothing was committed"):
        ingest(repository, listed, "table", source_options=SourceOptions())
    assert repository.names("datasets") == []


@pytest.mark.parametrize("as_source", [str, Path])
def test_a_table_that_changes_after_it_was_read_is_noticed(repository, tmp_path, as_source):
    path = tmp_path / "table.csv"
    path.write_text("a\n1\n", encoding="utf-8")
    progress = RecordedProgress(on_advance=lambda: os.utime(path, (1, 1)))
    with pytest.raises(SourceChangedError, match="nothing was committed"):
        ingest(repository, as_source(path), "table", progress=progress)
    assert repository.names("datasets") == []


def test_a_gc_during_a_continued_ingest_removes_no_shard_of_it(repository, folder):
    interrupt(repository, folder, LISTED, after=4)
    for path in Path(repository.url).rglob("*"):
        os.utime(path, (1, 1))
    before_s = time.time() - 3600
    garbage = list_old(repository, before_s)
    discard_referenced(garbage, referenced_objects(repository, before_s))
    assert ingest(repository, str(folder), "pets", **LISTED).num_resumed == 4
    sweep(repository, garbage, before_s)
    assert verify(repository, "pets", deep=True).problems == ()


def ingest_together(url, source, barrier):
    """Ingest, and wait before the commit until the twin stands there too."""
    run = IngestCommit.run

    def run_together(self):
        barrier.wait(timeout=60)
        return run(self)

    IngestCommit.run = run_together
    ingest(Repository.open(url), source, "pets", **LISTED)


@pytest.mark.slow
def test_equal_ingests_at_once_commit_one_version(repository, folder):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    twins = [context.Process(target=ingest_together, args=(repository.url, str(folder), barrier)) for _ in range(2)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join()
        assert twin.exitcode == 0
    assert [entry.number for entry in repository.entries("datasets", "pets")] == [1]


def test_other_choices_after_a_commit_that_was_killed_are_an_ingest_of_their_own(repository, folder, monkeypatch):
    (folder / "train" / "b" / "copy.jpg").write_bytes((folder / "train" / "a" / "00000.jpg").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda _self: None)
        ingest(repository, str(folder), "pets", **LISTED)
        assert str(ingest(repository, str(folder), "pets", **LISTED).version) == "pets@1"
    report = ingest(repository, str(folder), "pets", duplicates="drop", **LISTED)
    assert (str(report.version), report.num_samples["train"]) == ("pets@2", 20)


def test_a_damaged_journal_only_costs_its_work(repository, folder):
    interrupt(repository, folder, LISTED, after=3)
    for plan in Path(repository.url, "journal").rglob("plan.json"):
        plan.write_bytes(b"")
    assert ingest(repository, str(folder), "pets", **LISTED).num_samples == {"train": 20, "val": 6}


def test_other_options_never_continue_an_interrupted_ingest(repository, folder):
    interrupt(repository, folder, LISTED, after=2)
    assert ingest(repository, str(folder), "pets", shard_bytes=5000).num_resumed == 0
    assert ingest(repository, str(folder), "others", **LISTED).num_resumed == 0


def test_a_recorded_shard_that_is_gone_is_made_again(tmp_path, folder):
    reference, repository = (Repository.create(str(tmp_path / name)) for name in ("reference", "killed"))
    ingest(reference, str(folder), "pets", **LISTED)
    interrupt(repository, folder, LISTED, after=3)
    for path in Path(repository.url, "objects").rglob("*"):
        if path.is_file():
            path.unlink()
    assert ingest(repository, str(folder), "pets", **LISTED).num_resumed == 0
    assert digests(repository, "pets") == digests(reference, "pets")
    assert sum(1 for split in open_dataset(repository, "pets").values() for _ in split) == 26


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ("longer", "it had .* bytes when it was listed and now has"),
        ("shorter", "it had .* bytes when it was listed and now has"),
        ("touched", "its modification time changed after it was listed;"),
    ],
)
def test_a_file_that_changes_after_the_listing_is_noticed(repository, folder, change, detail):
    listed = ImageFolderSource.list(str(folder))
    path = folder / "train" / "a" / "00000.jpg"
    content = path.read_bytes()
    path.write_bytes({"longer": content + b"x", "shorter": content[:-1], "touched": content}[change])
    os.utime(path, (1, 1))
    with pytest.raises(SourceChangedError, match=rf"00000\.jpg changed while it was ingested: {detail}"):
        ingest(repository, listed, "pets")
    assert repository.names("datasets") == []


SLOW = """
import os, sys, time
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.shards.images import header
from datasvc.shards.ingestion import executors
real = header.read_header
def read_header(*arguments, **options):
    if os.getppid() == driver:
        open(os.path.join(sys.argv[3], str(os.getpid())), "w").close()
        os.read(os.open(sys.argv[3] + ".gate", os.O_RDONLY), 1)
    return real(*arguments, **options)
driver = os.getpid()
header.read_header = read_header
executors.choose_start_method = lambda **_: "fork"
try:
    ingest(Repository.open(sys.argv[1]), sys.argv[2], "pets", shard_bytes=2500, workers=2)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def stuck(tmp_path, repository, folder):
    """An ingest whose two workers wait in the middle of a shard; returns it and the numbers of its workers."""
    told = tmp_path / "told"
    told.mkdir()
    os.mkfifo(f"{told}.gate")
    words = [sys.executable, "-c", SLOW, repository.url, str(folder), str(told)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while len(os.listdir(told)) < 2:
        assert process.poll() is None
        os.sched_yield()
    yield process, [int(name) for name in os.listdir(told)]
    process.kill()
    process.wait()


def test_a_killed_worker_ends_the_ingest_with_an_error_and_the_next_ingest_succeeds(stuck, repository, folder):
    process, workers = stuck
    os.kill(workers[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=30)
    assert said.startswith("UnavailableError a worker process of the ingest died")
    assert repository.names("datasets") == []
    assert ingest(repository, str(folder), "pets", **LISTED).num_samples == {"train": 20, "val": 6}


def test_workers_end_when_their_driver_is_killed(stuck):
    process, workers = stuck
    watched = [os.pidfd_open(worker) for worker in workers]
    process.kill()
    process.wait()
    for descriptor in watched:
        assert wait([descriptor], 20)
        os.close(descriptor)


MEASURED = r"""
import re, sys
from datasvc.repository import Repository
from datasvc.shards import ingest
ingest(Repository.create(sys.argv[1]), sys.argv[2], "table", shard_bytes=int(sys.argv[3]))
# Not getrusage: that counts what this process was before it became this program, a part of the test's own memory.
print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) << 10)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path):
    shard_bytes = 8 << 20
    peaks = []
    for name, num_tars in (("small", 60), ("large", 200)):
        contents = {f"{number:06d}.bin": os.urandom(100_000) for number in range(10 * num_tars)}
        write_tars(tmp_path / f"{name}-tars", contents, per_tar=10)
        words = [sys.executable, "-c", MEASURED, tmp_path / name, tmp_path / f"{name}-tars", shard_bytes]
        done = subprocess.run(list(map(str, words)), cwd=ROOT, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout))
    # The large one holds 140 MB more; what an allocator keeps for itself differs between runs.
    assert peaks[1] - peaks[0] < 4 * shard_bytes, peaks

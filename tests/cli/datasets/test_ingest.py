"""`datasvc ingest` as a user runs it."""

import json
import os
import pty
import subprocess
import sys

import pytest

from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.cli.command import ROOT, run
from tests.cli.test_cli import datasvc
from tests.samples import class_sorted, jpeg, write_folder, write_tars


def events(done):
    """Return the events that an ingest printed, one a line."""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_left_out_samples_are_named_and_the_exit_status_says_so(folder, tmp_path):
    (folder / "train" / "a" / "bad.jpg").write_bytes(b"")
    for name in ("notes.txt", "more.txt", "README"):
        (folder / name).write_text("x")
    done = datasvc("ingest", folder, "pets", "--on-bad", "skip", repo=tmp_path / "repo")
    assert done.returncode == 6
    assert "committed pets@1: 20 train, 6 val samples" in done.stdout
    assert "skipped train/a/bad.jpg: empty file" in done.stderr
    assert "1 bad sample left out; `datasvc show pets@1 --bad` lists them" in done.stderr
    assert "ignored files: 2 .txt, 1 without an extension" in done.stderr
    shown = datasvc("show", "pets@1", "--bad", repo=tmp_path / "repo")
    assert (shown.returncode, shown.stdout) == (0, "split\tkey\treason\ntrain\ta/bad.jpg\tempty file\n")
    assert json.loads(datasvc("show", "pets", "--bad", "--json", repo=tmp_path / "repo").stdout) == [
        {"split": "train", "key": "a/bad.jpg", "reason": "empty file"}
    ]


@pytest.mark.slow
def test_an_empty_file_is_named_as_such_when_images_are_scaled_down(folder, tmp_path):
    (folder / "train" / "a" / "bad.jpg").write_bytes(b"")
    done = datasvc("ingest", folder, "pets", "--on-bad", "skip", "--max-side", "10", repo=tmp_path / "repo")
    assert "skipped train/a/bad.jpg: empty file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_ingest_ends_with_one_line_and_continues_with_the_same_command(tmp_path, workers):
    folder = write_folder(tmp_path / "images", {"train": {"cat": 40}})
    words = ["ingest", str(folder), "pets", "--repo", str(tmp_path / "repo"), "--shard-size", "1kB", "--json"]
    script = "import os, signal; from datasvc.shards.ingestion import ingest as module\n"
    # The signal of the terminal comes when the shards are built and before the commit.
    script += "module.check_bad = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
    script += "import sys; from datasvc.cli.main import main; main()"
    stopped = subprocess.run(
        [sys.executable, "-c", script, *words, "--workers", str(workers)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert stopped.returncode == 130
    assert stopped.stderr == "interrupted; the same command continues where this one stopped\n"
    done = run(*words)
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1])["resumed_shards"] > 0


@pytest.mark.slow
def test_a_relative_source_is_recorded_as_an_absolute_path(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.cli.command.ROOT", folder.parent)
    assert datasvc("ingest", folder.name, "pets", repo=tmp_path / "repo").returncode == 0
    shown = datasvc("show", "pets", repo=tmp_path / "repo").stdout
    assert f"source: {folder}\n" in shown


def test_counts_of_one_have_a_singular(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": \n', encoding="utf-8")
    done = datasvc("ingest", tmp_path / "rows.jsonl", "rows", "--on-bad", "skip", repo=tmp_path / "repo")
    assert "1 train samples, 1 shard, " in done.stdout
    # The number in the key of a line is no line number.
    assert "skipped train/rows.jsonl#9: the line at byte 9 is not a JSON object" in done.stderr


@pytest.mark.slow
def test_json_gives_an_event_a_line_and_the_last_says_what_was_committed(folder, tmp_path):
    (folder / "train" / "a" / "bad.jpg").write_bytes(b"")
    (folder / "train" / "b" / "copy.jpg").write_bytes((folder / "train" / "a" / "00000.jpg").read_bytes())
    where = {"repo": tmp_path / "repo"}
    done = datasvc("ingest", folder, "pets", "--on-bad", "skip", "--shard-size", "3kB", "--json", **where)
    assert done.returncode == 6
    listed, *progress, committed = events(done)
    assert (listed["event"], listed["format"]) == ("listed", "image-folder")
    assert {event["event"] for event in progress} == {"progress"}
    assert progress[-1]["samples"] == 28
    assert progress[-1]["bytes"] == listed["bytes"]
    assert progress[-1]["shards"] == sum(committed["shards"].values())
    assert (committed["event"], committed["version"]) == ("committed", "pets@1")
    assert committed["samples"] == {"train": 21, "val": 6}
    assert committed["skipped"] == [{"split": "train", "key": "a/bad.jpg", "reason": "empty file"}]
    assert {each["key"] for each in committed["duplicates"]["train"]} <= {"a/00000.jpg", "b/copy.jpg"}


@pytest.mark.slow
def test_an_append_says_what_it_added_and_what_it_left_out_of_earlier_versions(folder, tmp_path):
    where = {"repo": tmp_path / "repo"}
    datasvc("ingest", folder, "pets", **where)
    new = tmp_path / "new" / "train" / "a"
    new.mkdir(parents=True)
    for number in range(3):
        (new / f"{number:05}.jpg").write_bytes(jpeg(seed=900 + number))
    words = ("ingest", tmp_path / "new", "pets", "--append", "--on-common", "replace")
    done = datasvc(*words, **where)
    assert "added 3 train samples; left out 3 train samples of earlier versions" in done.stdout
    (new / "00001.jpg").write_bytes(jpeg(seed=950))
    committed = events(datasvc(*words, "--json", **where))[-1]
    assert (committed["added"], committed["left_out"]) == ({"train": 3}, {"train": 3})


def test_a_dry_run_makes_nothing(folder, tmp_path):
    done = datasvc("ingest", folder, "pets", "--dry-run", repo=tmp_path / "repo")
    assert done.returncode == 0
    for line in ("format: image-folder", "train: 20", "shards: 2", "label: int32"):
        assert line in done.stdout
    planned = events(datasvc("ingest", folder, "pets", "--dry-run", "--json", repo=tmp_path / "repo"))[-1]
    assert planned["num_samples"] == {"train": 20, "val": 6}
    assert not (tmp_path / "repo").exists()


def test_options_reach_the_ingest(tmp_path):
    source = write_tars(tmp_path / "tars", class_sorted(40, 4), per_tar=20)
    where = {"repo": tmp_path / "repo"}
    words = ["--format", "webdataset", "--split", "all", "--limit", "30", "--keep-order", "--workers", "2"]
    assert datasvc("ingest", f"{source}/train-{{000000..000003}}.tar", "pets", *words, **where).returncode == 0
    split = open_dataset(Repository.open(str(tmp_path / "repo")), "pets")["all"]
    assert [sample["key"] for sample in split] == [f"{number:05d}" for number in range(30)]
    assert datasvc("ingest", source, "pets", "--append", "--on-common", "keep", **where).returncode == 0
    assert datasvc("ingest", source, "more", "--val-fraction", "0.3", "--max-side", "20", **where).returncode == 0
    found = open_dataset(Repository.open(str(tmp_path / "repo")), "more")
    assert set(found) == {"train", "val"}
    assert found["val"].table.largest("max_width") == 20


def test_a_folder_whose_format_cannot_be_told_is_refused_with_the_formats(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.bin").write_bytes(b"x")
    done = datasvc("ingest", tmp_path / "odd", "pets", repo=tmp_path / "repo")
    assert done.returncode == 2
    assert "choose it with --format: image-folder, " in done.stderr
    assert datasvc("ingest", tmp_path, "pets", "--format", "zip", repo=tmp_path / "repo").returncode == 2


@pytest.mark.slow
def test_a_terminal_sees_a_bar_of_bytes_with_the_time_left(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.jpg").write_bytes(jpeg(seed=number))
    ours, theirs = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "datasvc.cli.main",
        "ingest",
        str(source),
        "pets",
        "--repo",
        str(tmp_path / "repo"),
    ]
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0
    os.close(ours)
    assert b"ingesting pets" in shown
    size_bytes = sum(path.stat().st_size for path in source.iterdir())
    assert f"{size_bytes / 1000:.1f}/{size_bytes / 1000:.1f} kB".encode() in shown
    assert b"0:00:00" in shown


@pytest.mark.parametrize("words", [["--quality", "0"], ["--val-fraction", "2"], ["--workers", "0"]])
def test_options_out_of_range_are_usage_errors_and_make_no_repository_data(folder, tmp_path, words):
    done = datasvc("ingest", folder, "pets", *words, repo=tmp_path / "repo")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert datasvc("ls", repo=tmp_path / "repo").stdout == ""

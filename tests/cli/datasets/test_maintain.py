"""verify and gc as a user runs them."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from datasvc.cli.datasets.maintain import parse_duration
from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from tests.cli.datasets.test_show import datasvc, said
from tests.shards.written_versions import write_version


@pytest.fixture
def pets(repository):
    samples = [{"key": f"k{number}", "text": "text"} for number in range(4)]
    write_version(repository, "pets", {"train": [samples[:2], samples[2:]]})
    return repository


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_whole_version_verifies_with_status_0(pets, deep):
    done = datasvc("verify", "pets", *deep, repo=pets.url)
    assert done.returncode == 0
    assert "pets@1: 4 samples in 2 shards" in done.stdout
    assert done.stdout.splitlines()[-1] == "no problems"
    assert said(datasvc("verify", "pets", *deep, "--json", repo=pets.url))["problems"] == []


def test_a_damaged_one_ends_with_3_and_names_shard_and_samples(pets):
    digest = open_dataset(pets, "pets")["train"].table.shard(1).digest
    pets.objects.local_path(digest).unlink()
    done = datasvc("verify", "pets", repo=pets.url)
    assert done.returncode == 3
    assert f"train: shard 1 ({digest}) is missing" in done.stdout
    assert "2 samples affected: k2, k3" in done.stdout
    assert "1 problem" in done.stdout.splitlines()
    done = datasvc("verify", "pets", "--deep", "--json", repo=pets.url)
    assert done.returncode == 3
    (problem,) = json.loads(done.stdout)["problems"]
    assert (problem["kind"], problem["shard"], problem["keys"]) == ("missing", 1, ["k2", "k3"])


def test_gc_lists_what_it_would_remove_and_removes_it_with_yes(pets):
    lost = pets.objects.put(b"nobody names me")
    for path in Path(pets.url).rglob("*"):
        os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    done = datasvc("gc", repo=pets.url)
    assert done.stdout.startswith(
        "would remove 1 object (15 bytes), 0 unfinished files, 0 journals, 0 run logs; kept 5 objects"
    )
    assert "add --yes" in done.stdout
    assert pets.objects.size(lost.digest) == 15
    assert said(datasvc("gc", "--grace", "9d", "--json", repo=pets.url))["objects"] == []
    removed = said(datasvc("gc", "--yes", "--json", repo=pets.url))
    assert (removed["dry_run"], removed["size_bytes"]) == (False, 15)
    assert removed["objects"] == [{"digest": lost.digest, "size_bytes": 15}]
    assert pets.objects.size(lost.digest) is None
    assert "removed 0 objects" in datasvc("gc", "--yes", repo=pets.url).stdout
    assert datasvc("verify", "pets", "--deep", repo=pets.url).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gc", "--grace", "2 weeks"], 2, "'2 weeks' is not a valid duration; write for example 7d"),
        (["gc", "--grace", "47h", "--yes"], 2, "--no-writers"),
        (["verify", "cats"], 1, "no data set 'cats'"),
    ],
)
def test_errors_say_what_to_do_without_a_traceback(pets, arguments, code, message):
    done = datasvc(*arguments, repo=pets.url)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_gc_removes_nothing_where_an_entry_is_corrupt(pets):
    lost = pets.objects.put(b"nobody names me")
    path = Path(pets.url, "datasets/pets/versions/00000001.json")
    path.write_text(path.read_text().replace('"skipped": 0', '"skipped": 1'))
    done = datasvc("gc", "--grace", "0s", "--no-writers", "--yes", repo=pets.url)
    assert (done.returncode, "Nothing was deleted" in done.stderr) == (3, True)
    assert pets.objects.size(lost.digest) == 15


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604800), ("48h", 172800), ("1.5m", 90), ("0s", 0), (" 3 d ", 259200)]
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7w", "1d2h"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError):
        parse_duration(text)


def test_json_counts_what_two_splits_share_and_lists_the_first_thousand(repository):
    samples = [{"key": f"{number:04}", "text": ""} for number in range(1001)]
    write_version(repository, "texts", {"train": [samples], "val": [samples]})
    done = datasvc("verify", "texts", "--json", repo=repository.url)
    assert done.returncode == 3
    (shared,) = json.loads(done.stdout)["overlaps"]
    assert (shared["kind"], shared["num_samples"], len(shared["samples"])) == ("key", 1001, 1000)
    assert shared["samples"][-1] == {"key": "0999", "other_key": "0999"}


def test_the_lost_samples_of_a_damaged_version_are_deleted(pets):
    assert datasvc("delete", "pets", "--damaged", repo=pets.url).stdout == (
        "nothing to delete: pets@1 stays the newest version\n"
    )
    pets.objects.local_path(open_dataset(pets, "pets")["train"].table.shard(1).digest).unlink()
    would = datasvc("delete", "pets", "--damaged", "--dry-run", repo=pets.url)
    assert would.stdout == "would delete 2 train samples of pets@1; nothing was committed\n"
    done = datasvc("delete", "pets", "--damaged", repo=pets.url)
    assert (done.returncode, done.stdout) == (0, "committed pets@2: deleted 2 train samples\n")
    assert datasvc("verify", "pets", "--deep", repo=pets.url).returncode == 0
    assert datasvc("delete", "pets", "--damaged", "--where", "true", repo=pets.url).returncode == 2


def test_a_damaged_version_is_repaired_from_another_repository(pets, tmp_path):
    shutil.copytree(pets.url, tmp_path / "backup")
    digest = open_dataset(pets, "pets")["train"].table.shard(1).digest
    pets.objects.local_path(digest).write_bytes(b"x")
    done = datasvc("verify", "pets", "--repair-from", tmp_path / "backup", repo=pets.url)
    assert done.returncode == 0
    assert f"repaired: {digest}; the bad bytes are kept in " in done.stdout
    assert done.stdout.splitlines()[-1] == "no problems"
    facts = said(datasvc("verify", "pets", "--repair-from", tmp_path / "backup", "--json", repo=pets.url))
    assert (facts["problems"], facts["repairs"], facts["num_left"]) == ([], [], 0)

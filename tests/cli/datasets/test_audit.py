"""audit as a user runs it."""

import json

import pytest

from datasvc.ledger.file import RECORD_BYTES
from datasvc.order import AccessOrder, OrderConfig
from datasvc.shards import open_dataset
from tests.cli.datasets.test_show import datasvc, said
from tests.loaders.echo import EchoLoader, write_numbers


@pytest.fixture
def ledger(repository, tmp_path):
    """The ledger of two ranks that served an epoch of forty samples and a step of the next."""
    write_numbers(repository, [25, 15])
    split = open_dataset(repository, "numbers")["train"]
    for rank in range(2):
        with EchoLoader(split, batch_size=6, rank=rank, world_size=2, ledger=tmp_path / "ledger") as loader:
            assert len(list(loader)) == 3
            next(iter(loader))
    return tmp_path / "ledger"


def file_of_rank(ledger, rank):
    (path,) = ledger.glob(f"*-rank{rank}-of-*")
    return path


def test_a_whole_epoch_is_proven_with_status_0(ledger):
    done = datasvc("audit", ledger)
    assert done.returncode == 0, done.stderr
    sound = "no sample was lost or served twice"
    assert done.stdout.splitlines() == [
        "numbers@1/train: 2 files, ranks 2",
        f"epoch 0: proven: {sound}; 36 of 40 served once, 4 dropped by the tail",
        "  served 36, dropped 4 that filled no batch",
        f"epoch 1: not finished: in the first 12 of 40 positions, {sound}; 12 of 12 served once",
        "  served 12",
    ]
    facts = said(datasvc("audit", ledger, "--json"))
    assert (facts["is_proven"], facts["source"], facts["num_samples"]) == (True, "numbers@1/train", 40)
    assert facts["order"]["seed"] == 1
    first, second = facts["epochs"]
    assert {name: first[name] for name in ("epoch", "served", "dropped", "is_proven")} == {
        "epoch": 0, "served": 36, "dropped": 4, "is_proven": True,
    }  # fmt: skip
    assert (second["is_finished"], second["reached"]) == (False, 12)


def test_one_epoch_is_looked_at_when_asked_for_and_must_be_finished(ledger):
    assert datasvc("audit", ledger, "--epoch", "0").returncode == 0
    assert datasvc("audit", ledger, "--epoch", "1").returncode == 1
    done = datasvc("audit", ledger, "--epoch", "2")
    assert (done.returncode, done.stderr) == (
        1,
        "error: the ledger has no epoch 2; it has epochs 0 to 1\n",
    )


def test_samples_that_a_rank_did_not_serve_are_named_by_position_or_key(ledger, repository):
    file_of_rank(ledger, 1).unlink()
    done = datasvc("audit", ledger, "--show", "2")
    assert done.returncode == 1
    assert "epoch 0: not proven: 18 samples never, 0 more than once" in done.stdout
    assert "  never served: position 6, position 7, and 16 more" in done.stdout
    assert "rank 1 left no file" in done.stdout
    split = open_dataset(repository, "numbers")["train"]
    shards, rows = AccessOrder(split.table.samples_per_shard, OrderConfig(seed=1), 0).locate([6, 7])
    keys = [str(row + (25 if shard else 0)) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
    done = datasvc("audit", ledger, "--show", "2", repo=repository.url)
    assert f"  never served: {keys[0]} (position 6), {keys[1]} (position 7), and 16 more" in done.stdout
    done = datasvc("audit", ledger, "--show", "1", "--json", repo=repository.url)
    assert done.returncode == 1
    never = json.loads(done.stdout)["epochs"][0]["never"]
    assert never == {"count": 18, "samples": [{"position": 6, "key": keys[0]}]}


@pytest.mark.parametrize("change", [["rename", "numbers", "counts"], ["rm", "numbers@1"]])
def test_keys_are_found_after_the_version_was_renamed_or_removed(ledger, repository, change):
    file_of_rank(ledger, 1).unlink()
    before = datasvc("audit", ledger, repo=repository.url)
    assert "never served" in before.stdout
    assert datasvc(*change, repo=repository.url).returncode == 0
    after = datasvc("audit", ledger, repo=repository.url)
    assert (after.stdout, after.stderr, after.returncode) == (before.stdout, before.stderr, before.returncode)


def test_a_rank_with_fewer_files_than_others_is_named_and_nothing_is_proven(ledger, repository):
    split = open_dataset(repository, "numbers")["train"]
    with EchoLoader(split, batch_size=6, rank=0, world_size=2, ledger=ledger) as loader:
        list(loader)
    done = datasvc("audit", ledger)
    assert done.returncode == 1
    assert "rank 1 left 1 file where others left 2" in done.stdout
    assert "epoch 0: not proven" in done.stdout


def test_keys_come_from_no_other_version_than_the_run_read(ledger, repository, tmp_path):
    file_of_rank(ledger, 1).unlink()
    for path in (tmp_path / "repo" / "datasets" / "numbers" / "versions").iterdir():
        path.unlink()
    write_numbers(repository, [40])
    done = datasvc("audit", ledger, repo=repository.url)
    assert done.returncode == 2
    assert "give the repository that the run read" in done.stderr


def test_a_damaged_ledger_ends_with_3_and_is_named(ledger):
    path = file_of_rank(ledger, 1)
    content = bytearray(path.read_bytes())
    content[-3 * RECORD_BYTES + 20] ^= 1
    path.write_bytes(content)
    done = datasvc("audit", ledger)
    assert done.returncode == 3
    assert f"{path}: record 0, at byte" in done.stdout
    assert "not proven: 18 samples never" in done.stdout
    for each in ledger.iterdir():
        each.write_bytes(b"x")
    done = datasvc("audit", ledger)
    assert done.returncode == 3
    assert "does not start with the header of a ledger" in done.stderr


def test_a_ledger_whose_end_a_crash_cut_off_is_reported(ledger):
    path = file_of_rank(ledger, 1)
    path.write_bytes(path.read_bytes()[:-10])
    done = datasvc("audit", ledger)
    assert done.returncode == 0
    assert f"{path}: its end was cut off by a crash" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "LEDGER"),
        (["/dev/null/nothing"], 1, "neither a folder nor a file of a ledger"),
        (["."], 1, "has no files of a ledger"),
    ],
)
def test_errors_say_what_to_do(arguments, code, message):
    done = datasvc("audit", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr

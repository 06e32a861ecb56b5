"""datasvc plan cache as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.cli.command import run

ROOT = Path(__file__).parents[2]
WINDOWED = ("--shuffle", "windowed", "--block", "16", "--batch-size", "4", "--prefetch", "0")

BLOCKS = 50_000  # what the shards take more of a disk than they have bytes


def plan(digits, *arguments):
    return run("plan", "cache", "digits@1", *arguments, DATASVC_REPO=digits.repository.url)


@pytest.fixture
def data_bytes(digits):
    return digits["train"].table.size_bytes


def test_a_plan_says_what_will_be_resident_and_where_bytes_come_from(digits, data_bytes):
    done = plan(digits, "--budget", data_bytes + BLOCKS, "--nodes", 4, "--images-per-second", 1000)
    assert done.returncode == 0, done.stderr
    assert "100% of the data" in done.stdout
    assert "1.00 x the data" in done.stdout.partition("each later epoch")[0]
    assert "0.00 x the data" in done.stdout.partition("each later epoch")[2]
    assert done.stdout.count("bandwidth needed") == 2
    assert "starves" not in done.stdout


def test_facts_come_as_json(digits, data_bytes):
    done = plan(digits, "--budget", data_bytes * 9 // 10, *WINDOWED, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["data_bytes"] == found["first_epoch"]["origin_bytes"] == data_bytes
    assert 0 < found["later_epochs"]["origin_bytes"] < data_bytes
    assert found["resident_bytes"] <= found["budget_bytes"] == data_bytes * 9 // 10
    assert found["num_samples"] == len(digits["train"])


def test_a_windowed_plan_without_numbers_has_those_that_a_loader_derives(digits, data_bytes):
    needed = ("--budget", data_bytes * 8 // 10, "--shuffle", "windowed", "--batch-size", 8)
    found = json.loads(plan(digits, *needed, "--json").stdout)
    order = found["order"]
    assert order["shuffle"] == "windowed"
    assert found["window_bytes"] <= data_bytes * 8 // 10
    assert f"order: windowed, {order['lanes']} lane" in plan(digits, *needed).stdout


@pytest.mark.slow
def test_a_plan_reports_that_a_run_will_starve(digits, data_bytes):
    needed = ("--budget", data_bytes + BLOCKS, "--images-per-second", 1000)
    done = plan(digits, *needed, "--origin-rate", "1kB")
    assert done.returncode == 0, done.stderr
    first, _, later = done.stdout.partition("each later epoch")
    assert "starves: yes: the bandwidth suffices for" in first
    assert "of 1000 images/s per node" in first
    assert "starves: no" in later
    assert "starves: yes" not in plan(digits, *needed, "--origin-rate", "10GB").stdout
    without = plan(digits, "--budget", data_bytes + BLOCKS, "--origin-rate", "1kB").stdout
    assert "trains at most" in without


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--budget", "100kB"), 1, "bytes of the cache at once, and 100000 are available"),
        (("--budget", "nothing"), 2, "'nothing' is not a valid size"),
        (("--budget", "1GB", "--nodes", "0"), 2, "nodes is 0; expected 1 or more"),
        (("--budget", "1GB", "--shuffle", "windowed", "--lanes", "2"), 2, "needs lanes >= 1 and block >= 1"),
        (("--budget", "1GB", "--lanes", "4"), 2, "apply only to shuffle='windowed'"),
        (("--budget", "1GB", "--split", "exam"), 1, "digits@1 has no split 'exam'"),
        (("--budget", "1GB", "--origin-rate", "fast"), 2, "'fast' is not a valid size"),
        (("--budget", "1GB", "--images-per-second", "-1"), 2, "expected more than 0"),
    ],
    ids=str,
)
def test_errors_say_what_to_do_without_a_traceback(digits, arguments, code, message):
    done = plan(digits, *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_of_staging_has_a_row_for_each_number_of_nodes():
    arguments = ("--bytes", "300MB", "--object-size", "10MB", "--origin-bandwidth", "1GB/s", "--hot")
    done = run("plan", "staging", *arguments, "--nodes", 1, "--nodes", 3, "--lose", "1@50%")
    assert done.returncode == 2
    assert "more than are lost" in done.stderr
    done = run("plan", "staging", *arguments, "--nodes", 2, "--nodes", 3, "--json")
    assert done.returncode == 0, done.stderr
    two, three = json.loads(done.stdout)
    assert (two["num_nodes"], three["num_nodes"], three["num_objects"]) == (2, 3, 30)
    assert two["origin_bytes"] == pytest.approx(300e6)
    assert three["peer_bytes"] == pytest.approx(600e6)
    assert three["staged_s"] > three["bound_s"] == pytest.approx(0.3)
    done = run("plan", "staging", *arguments, "--nodes", 2)
    assert f"{two['staged_s']:.1f} s" in done.stdout
    assert "2 nodes, hot object on all nodes:" in done.stdout

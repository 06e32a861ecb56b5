"""`datasvc export` as a user runs it."""

import json
from pathlib import Path
from typing import get_args

import pytest

from datasvc.cli.datasets.transfer import DatasetFormat
from datasvc.shards.export import FORMATS
from tests.cli.command import run
from tests.shards.export.contents import write_photos

ROOT = Path(__file__).parents[3]


def export(*arguments, repo):
    return run("export", *arguments, DATASVC_REPO=repo)


def test_it_has_help_with_an_example_and_offers_every_format(repository):
    done = export("--help", repo=repository.url)
    assert done.returncode == 0
    assert "Example: datasvc export pets@3" in done.stdout
    assert "--json" in done.stdout
    assert list(get_args(DatasetFormat)) == list(FORMATS)


def test_it_says_what_it_wrote(repository, tmp_path):
    write_photos(repository)
    done = export("photos", tmp_path / "out", "--format", "webdataset", repo=repository.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"exported photos@1 as webdataset to {tmp_path / 'out'}: 7 train, 2 val samples, 3 files"
    )
    assert done.stderr == ""
    done = export("photos@1", tmp_path / "2", "--format", "mds", "--split", "val", "--json", repo=repository.url)
    said = json.loads(done.stdout)
    size_bytes = said["splits"]["val"].pop("bytes")
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / "2" / "val").iterdir())
    assert said == {
        "version": "photos@1",
        "format": "mds",
        "destination": str(tmp_path / "2"),
        "splits": {"val": {"samples": 2, "files": 2}},
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["cats", "out", "--format", "mds"], 1, "no data set 'cats'"),
        (["photos", "out", "--format", "zarr"], 2, "Invalid value for '--format'"),
        (["photos", "out"], 2, "Missing option '--format'"),
        (["photos", "out", "--format", "mds", "--split", "x"], 1, "no split 'x'"),
        (["photos", "out", "--format", "mds", "--workers", "0"], 2, "Invalid value for '--workers'"),
        (["photos", "memory://x", "--format", "lmdb"], 2, "local folders only"),
        (["photos", ".", "--format", "mds"], 2, "is not empty"),
        (["photos", "nosuch://x", "--format", "mds"], 2, "cannot use 'nosuch://x'"),
    ],
)
def test_a_mistake_ends_with_a_message_and_its_exit_code(repository, arguments, code, message):
    write_photos(repository)
    done = export(*arguments, repo=repository.url)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert message in done.stderr

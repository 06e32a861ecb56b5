"""samples, sample and histogram as a user runs them."""

import json

import pytest

from datasvc.shards.query.histogram import histogram
from datasvc.shards.query.sample_details import read_sample
from datasvc.shards.query.sample_page import read_page
from datasvc.testing import small_dataset
from tests.cli.command import run


def datasvc(*arguments, repo):
    return run(*arguments, DATASVC_REPO=repo.url)


@pytest.fixture
def pets(repository):
    small_dataset(repository, "pets", samples=20, shard_bytes=4 << 10)
    return repository


def test_json_has_the_values_of_the_library(pets):
    page = read_page(pets, "pets", where="label = 1", count=3)
    key = page.samples[0].key
    for arguments, expected in (
        (("samples", "pets", "--where", "label = 1", "-n", "3"), page),
        (("sample", "pets", key), read_sample(pets, "pets", key)),
        (("histogram", "pets", "image", "--bins", "4"), histogram(pets, "pets", "image", bins=4)),
    ):
        assert json.loads(datasvc(*arguments, "--json", repo=pets).stdout) == expected.to_json()


def test_people_read_what_was_searched_and_how_to_continue(pets):
    num_shards = read_page(pets, "pets").num_shards
    done = datasvc("samples", "pets", "--where", "label < 3", "-n", "2", "--max-shards", "2", repo=pets)
    assert len(done.stdout.splitlines()) == 3
    assert "image=" in done.stdout
    assert f"pets@1/train has 20 samples; 2 of {num_shards} shards searched; continue with --start" in done.stderr
    done = datasvc("histogram", "pets", "label", repo=pets)
    assert done.stdout.splitlines()[1].startswith("class0\t5\t\N{FULL BLOCK}")
    assert f"20 samples from {num_shards} of {num_shards} shards" in done.stderr
    assert "payload_digest" in datasvc("sample", "pets", read_page(pets, "pets").samples[0].key, repo=pets).stdout


def test_a_repository_without_the_key_or_column_says_so(pets):
    assert "has no sample with the key 'x'" in datasvc("sample", "pets", "x", repo=pets).stderr
    assert "the columns are key, image" in datasvc("histogram", "pets", "x", repo=pets).stderr

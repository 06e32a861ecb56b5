"""Names that people bring from git and from other registries: which version they mean, and what is refused."""

import pytest

import datasvc
from datasvc.testing import small_dataset
from tests.cli.command import run
from tests.ui.conftest import running_ui


@pytest.fixture
def repo(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    for samples in (4, 5):
        small_dataset(repo, "pets", samples=samples)
    return repo


@pytest.fixture
def command(repo):
    return lambda *words: run(*words, DATASVC_REPO=repo.repository.url)


def test_a_tag_and_a_branch_of_one_name_are_refused_whichever_comes_first(command):
    """treeverse/lakeFS#2667, conventional-changelog/conventional-changelog#619: one name of both is ambiguous."""
    for first, second in (("branch", "tag"), ("tag", "branch")):
        words = {"branch": ("branch", "pets", f"{first}-first"), "tag": ("tag", "pets@1", f"{first}-first")}
        assert command(*words[first]).returncode == 0
        refused = command(*words[second])
        assert (refused.returncode, f"has a {first} '{first}-first'" in refused.stderr) == (2, True)


def test_no_tag_takes_the_name_of_the_main_line(command):
    """pschatzmann/ESP32-A2DP#194: a tag "main" at an old version, which everybody read as the newest one."""
    refused = command("tag", "pets@1", "main")
    assert (refused.returncode, "the main line is pets alone" in refused.stderr) == (2, True)
    assert command("models", "tag", "net@1", "main").returncode == 1  # a model has no main line, and here is no model


def test_a_tag_of_this_name_that_an_earlier_release_set_is_read_moved_and_removed(repo, command):
    """The neighbour of the fault above: what is in a repository keeps its meaning."""
    repo.repository._tags("datasets", "pets").move("main", 1, expect=None)
    assert repo.datasets.resolve("pets@main").version == 1
    assert command("tag", "pets@2", "main").returncode == 0
    assert repo.datasets.resolve("pets@main").version == 2
    assert command("tag", "pets", "main", "--remove").returncode == 0


@pytest.mark.parametrize("words", [("show", "pets@main"), ("merge", "pets@main", "pets@work"), ("head", "pets@main")])
def test_who_asks_for_main_learns_how_the_main_line_is_called(command, words):
    """pschatzmann/ESP32-A2DP#194: our advice was a command that is refused."""
    command("branch", "pets", "work")
    failed = command(*words)
    assert (failed.returncode, failed.stderr.strip().endswith("the main line is pets alone")) == (1, True)


def test_a_number_is_a_version_and_never_a_name(command):
    """treeverse/lakeFS#4738: a branch `767`, and a commit whose digest begins with 767."""
    for words in (("tag", "pets@1", "2"), ("branch", "pets", "2"), ("tag", "pets@1", "02")):
        assert command(*words).returncode == 2
    assert "pets@2" in command("show", "pets@2").stdout


@pytest.mark.parametrize("name", ["v.0.1.1", "1.0", "1e3", "a..b"])
def test_a_tag_like_a_release_opens_on_its_page(repo, command, name):
    """treeverse/lakeFS#2722, treeverse/lakeFS#9901: a tag that is no valid branch was not found."""
    assert command("tag", "pets@1", name).returncode == 0
    with running_ui(repo.repository.url) as ui:
        status, headers, html = ui.get(f"/datasets/pets@{name}")
        if status in {302, 303, 307}:
            status, _, html = ui.get(headers["Location"])
    assert (status, "pets@1" in html) == (200, True)


@pytest.mark.parametrize("name", ["feature/x", "Stable", "HEAD", "a b", "ä"])
def test_a_name_that_breaks_addresses_or_file_systems_is_refused(command, name):
    """projectnessie/nessie#6802, opsmill/infrahub#3874, vincentarelbundock/Rdatasets#32: slashes, and case alone."""
    for words in (("tag", "pets@1", name), ("branch", "pets", name)):
        refused = command(*words)
        assert (refused.returncode, "lower-case letters, digits" in refused.stderr) == (2, True)


def test_the_number_of_a_removed_version_is_not_given_again(repo, command):
    """mlflow/mlflow#4593, Comfy-Org/registry-backend#22: a number that was in use got another version."""
    assert command("rm", "pets@2", "--yes").returncode == 0
    small_dataset(repo, "pets", samples=6)
    assert [version.version for version in repo.datasets.versions("pets")][-1] == 3
    assert command("tag", "pets@2", "old").returncode == 1


def test_a_version_with_a_tag_is_removed_only_with_its_tag(repo, command):
    """mlflow/mlflow#24825, jundot/omlx#1321: an alias that points at a version which is gone, and blocks its name."""
    command("tag", "pets@1", "old")
    assert command("rm", "pets@01", "--yes").returncode == 2
    assert command("rm", "pets@1", "--yes", "--force").returncode == 0
    assert "old" not in command("tag", "pets").stdout
    assert command("branch", "pets", "old").returncode == 0

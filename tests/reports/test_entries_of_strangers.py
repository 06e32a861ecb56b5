"""What somebody else has written into a repository is pulled and shown without harm."""

import shutil
import signal

import pytest
import torch

from datasvc.models import save
from datasvc.repository import Repository
from datasvc.repository.logs.log import decode_log_entry, encode_entry
from tests.cli.command import run
from tests.shards.written_versions import write_version

ESCAPE = "\x1b]0;title\x07\x1b[2J"
HOSTILE = (
    10**400,
    -1,
    1.5,
    None,
    "../../outside",
    f"a\n{ESCAPE}",
    [],
    [ESCAPE],
    {ESCAPE: [ESCAPE]},
    "f" * 64,
    [[[[]]]],
)


@pytest.fixture
def stranger(tmp_path):
    """A repository with two versions of a data set and of a model, whose entries are changed later."""
    source = Repository.create(str(tmp_path / "stranger"))
    for number, key in enumerate("ab", start=1):
        write_version(source, "pets", {"train": [[{"key": key, "text": "x"}]]})
        save(source, "cnn", {"w": torch.full((4_000,), float(number))}, step=number)
    return source


def change(source, kind, name, number, edit):
    path = source.storage.local_path(source.versions(kind, name).path_of(number))
    content = decode_log_entry(path.read_bytes(), str(path))
    edit(content)
    path.write_bytes(encode_entry(content))


def pull(source, target, kind, *options):
    words = ("pull", "pets@2") if kind == "datasets" else ("models", "pull", "cnn@2")
    return run(*words, "--from", source.url, "--repo", target, *options)


def check_harmless(results, folder):
    for result in results:
        text = result.stdout + result.stderr
        assert "Traceback" not in text
        assert all(character.isprintable() or character in "\n\t" for character in text)
    assert {path.name for path in folder.iterdir()} <= {"stranger", "target"}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("datasets", "source"),
        ("datasets", "options"),
        ("datasets", "splits"),
        ("datasets", "val_fraction"),
        ("datasets", "change"),
        ("datasets", "parent"),
        ("datasets", "message"),
        ("models", "tensors"),
        ("models", "parent"),
        ("models", "message"),
        ("models", "config"),
        ("models", "data"),
        ("models", "origin"),
    ],
)
def test_any_value_in_a_field_ends_in_a_copy_or_an_error_of_ours(stranger, tmp_path, kind, field):
    """GitoxideLabs/gitoxide#1534, sindresorhus/np#804: what a foreign repository has is used as it is."""
    target = str(tmp_path / "target")
    name = "pets" if kind == "datasets" else "cnn"
    for value in HOSTILE:

        def edit(content, value=value):
            if field == "options":
                content["source"] = {"kind": "x", "options": value}
                content.pop("val_fraction", None)
            else:
                content[field] = value

        change(stranger, kind, name, 2, edit)
        shutil.rmtree(target, ignore_errors=True)
        Repository.create(target)
        show = ("show", "pets@2") if kind == "datasets" else ("models", "show", "cnn@2")
        results = [pull(stranger, target, kind), run(*show, "--repo", stranger.url)]
        check_harmless(results, tmp_path)


@pytest.mark.parametrize("kind", ["datasets", "models"])
def test_a_version_that_is_its_own_ancestor_ends_the_pull(stranger, tmp_path, kind):
    """GitoxideLabs/gitoxide#1534: what no program of ours writes, a stranger does. A cycle held the pull for ever."""
    target = str(tmp_path / "target")
    Repository.create(target)
    name = "pets" if kind == "datasets" else "cnn"
    for number, parent in ((1, 2), (2, 1)):

        def edit(content, parent=parent):
            content.pop("val_fraction", None)
            content |= {"parent": f"{name}@{parent}", "source": {"kind": "version", "url": "x", "options": {}}}

        change(stranger, kind, name, number, edit)
    signal.alarm(60)  # without the mend, the test would never end
    try:
        result = pull(stranger, target, kind, "--with-parents")
    finally:
        signal.alarm(0)
    check_harmless([result], tmp_path)
    assert "its own ancestor" in result.stderr if kind == "datasets" else not result.returncode

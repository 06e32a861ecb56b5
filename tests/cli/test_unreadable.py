"""Commands list what can be read, name the rest in one line on standard error, and end with status 3."""

import json

import pytest
import torch

from datasvc.models import save
from datasvc.models.versions.entry_fields import find_wrong_fields
from datasvc.repository import Repository
from datasvc.repository.logs.log import encode_entry
from datasvc.shards.versions.delete import delete
from tests.cli.command import run
from tests.models.entries import commit_entry
from tests.models.every_kind import flip
from tests.shards.written_versions import write_version


@pytest.fixture
def damaged(repository):
    for step in range(3):
        commit_entry(repository, "cnn", step=step, parent=f"cnn@{step}" if step else None)
    commit_entry(repository, "gpt")
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "a"}, {"key": "b", "text": "b"}]]})
    write_version(repository, "tales", {"train": [[{"key": "a", "text": "a"}]]})
    delete(repository, "pets", keys=["a"])
    for place in ("models/cnn/versions/00000003.json", "datasets/pets/versions/00000002.json"):
        path = repository.storage.local_path(place)
        flip(path, path.stat().st_size // 2)
    return repository


@pytest.mark.parametrize(
    ("words", "listed", "left_out"),
    [
        (["models", "ls"], "gpt@1", "cnn@3"),
        (["models", "log", "cnn"], "cnn@2", "cnn@3"),
        (["models", "find", "step < 9"], "cnn@2", "cnn@3"),
        (["ls"], "tales", "pets@2"),
        (["log", "pets"], "pets@1", "pets@2"),
    ],
)
def test_a_list_names_what_it_leaves_out(damaged, words, listed, left_out):
    plain = run(*words, "--repo", damaged.url)
    assert listed in plain.stdout
    assert left_out not in plain.stdout
    (line,) = plain.stderr.splitlines()
    assert line.startswith(f"warning: {left_out} is left out: the entry of {left_out} cannot be read")
    assert "mark-lost" in line
    assert plain.returncode == 3
    as_json = run(*words, "--json", "--repo", damaged.url)
    facts = json.loads(as_json.stdout)
    assert facts[-1].keys() == {"name", "version", "unreadable"}
    assert f"{facts[-1]['name']}@{facts[-1]['version']}" == left_out
    assert all("unreadable" not in fact for fact in facts[:-1])
    assert as_json.returncode == 3


def test_a_removal_of_a_damaged_version_names_the_command_that_gives_it_up(damaged):
    done = run("rm", "pets@2", "--repo", damaged.url)
    assert done.returncode == 0
    assert "gc deletes nothing" in done.stderr
    assert "`datasvc mark-lost pets@2`" in done.stderr
    assert "frees" not in done.stdout
    as_json = run("models", "rm", "cnn@3", "--json", "--repo", damaged.url)
    assert json.loads(as_json.stdout) == {"removed": ["cnn@3"], "untagged": [], "damaged": ["cnn@3"]}
    assert "`datasvc models mark-lost cnn@3` gives it up" in as_json.stderr


def test_a_comparison_leaves_out_what_it_cannot_read(damaged):
    result = run("models", "compare", "cnn@1", "cnn@2", "cnn@3", "--repo", damaged.url)
    assert (result.returncode, result.stdout.splitlines()[1:]) == (3, ["step\t0\t1"])
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: cnn@3 is left out")


ODD = [None, True, -1, 1.5, "odd", ["odd"], {"a": ["odd"]}]
COMMANDS = {
    "ls": ["ls"],
    "find": ["find", "version > 0", "--by", "top1"],
    "show": ["show", "cnn@2"],
    "compare": ["compare", "cnn@1", "cnn@2"],
    "gc": ["gc", "--yes", "--no-writers"],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("plain")))
    for step in range(2):
        save(repository, "cnn", {"w": torch.full((8,), float(step))}, step=step, metrics={"top1": 0.5})
    return repository


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_version_with_a_field_of_an_odd_type_is_one_line_and_status_3(plain, command):
    path = plain.storage.local_path("models/cnn/versions/00000002.json")
    kept, content = path.read_bytes(), dict(plain.versions("models", "cnn").read(2).content)
    num_refused = 0
    try:
        for number, field in enumerate(
            sorted({*content, "merged", "sharding", "origin", "imported"} - {"format", "checksum"})
        ):
            entries = [{**content, field: value} for value in ODD]
            wrong = list(filter(find_wrong_fields, entries))
            entry = wrong[-(number % 2)]  # the first or the last
            path.write_bytes(encode_entry(entry))
            result = run("models", *COMMANDS[command], "--repo", plain.url)
            lines = result.stderr.splitlines()
            assert (result.returncode, len(lines)) == (3, 1), (field, entry[field], result.stderr)
            assert "cnn@2" in lines[0]
            num_refused += 1
    finally:
        path.write_bytes(kept)
    assert num_refused > 20


def test_mark_lost_is_the_way_out(damaged):
    assert run("models", "verify", "--all", "--repo", damaged.url).returncode == 3
    refused = run("models", "gc", "--repo", damaged.url)
    assert (refused.returncode, refused.stdout) == (3, "")
    for name in ("cnn@3", "pets@2"):
        assert name in refused.stderr
    assert run("models", "mark-lost", "cnn@1", "--repo", damaged.url).returncode == 2
    done = run("models", "mark-lost", "cnn@3", "-m", "no copy", "--repo", damaged.url)
    assert "cnn@3 is marked as lost" in done.stdout
    as_json = run("mark-lost", "pets@2", "--json", "--repo", damaged.url)
    assert json.loads(as_json.stdout) == {"lost": ["pets@2"], "untagged": []}
    listed = run("models", "ls", "--repo", damaged.url)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "cnn@2" in listed.stdout
    shown = run("models", "show", "cnn@3", "--repo", damaged.url)
    assert "cnn@3" in shown.stderr
    assert shown.returncode == 3
    verified = run("models", "verify", "--all", "--repo", damaged.url)
    assert verified.returncode == 0
    assert "cnn@3 was declared lost" in verified.stdout
    assert "no problems in the other versions" in verified.stdout
    as_json = run("models", "verify", "--all", "--json", "--repo", damaged.url)
    assert json.loads(as_json.stdout)["lost"] == ["cnn@3"]
    cleaned = run("gc", "--grace", "0s", "--no-writers", "--repo", damaged.url)
    assert cleaned.returncode == 0, cleaned.stderr


def test_gc_says_what_is_younger_than_its_grace_and_how_to_remove_it(repository):
    for content in (b"x" * 1000, b"y" * 500):
        repository.objects.put(content)
    commit_entry(repository, "cnn")
    shown = run("gc", "--repo", repository.url).stdout
    assert "2 of these (1.50 kB) are not used by any version, but are younger than 7d" in shown
    assert "--grace 0s --no-writers" in shown
    facts = json.loads(run("gc", "--json", "--repo", repository.url).stdout)
    assert (facts["num_young"], facts["young_bytes"]) == (2, 1500)
    removed = run("gc", "--grace", "0s", "--no-writers", "--yes", "--repo", repository.url).stdout
    assert removed.startswith("removed 2 objects")
    assert "of these" not in removed


def test_a_data_set_entry_with_fields_of_a_wrong_type_hides_no_other_version(repository):
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "a"}]]})
    write_version(repository, "tales", {"train": [[{"key": "a", "text": "a"}]]})
    log = repository.versions("datasets", "pets")
    content = dict(log.read(1).content)
    for odd in ({"splits": {"train": {"table": "0" * 64, "samples": None}}}, {"splits": 7}, {"source": 7}):
        entry = {name: value for name, value in content.items() if name not in {"format", "commit", "created"}} | odd
        number = log.append(lambda _head, entry=entry: entry).number
        listed = run("ls", "--repo", repository.url)
        assert "tales" in listed.stdout
        logged = run("log", "pets", "--repo", repository.url)
        assert "pets@1" in logged.stdout
        shown = run("show", "pets", "--repo", repository.url)
        assert shown.returncode in {1, 3}
        assert "error: " in shown.stderr
        if "splits" in odd:
            assert f"pets@{number} is left out" in listed.stderr
            assert f"pets@{number} is left out" in logged.stderr

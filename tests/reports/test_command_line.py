"""What people meet at the prompt: how soon a command answers, its help, its completion, and what it does to data."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

import datasvc
from datasvc.doctor.finding import Finding
from datasvc.testing import encode_jpeg, small_dataset
from datasvc.trainer.recipes.models.registry import MODELS
from datasvc.trainer.recipes.settings import options
from tests.cli.command import ROOT, run

_LOADED = """
import atexit, sys
from datasvc.cli.main import main

atexit.register(lambda: print(*sys.modules))
main()
"""


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["--version"], {"numpy", "pyarrow", "fsspec", "asyncio", "pydantic", "rich.console", "datasvc.repository"}),
        (["ls", "--repo"], {"numpy", "pyarrow", "fsspec", "pandas", "torch", "duckdb", "rich.console"}),
    ],
)
def test_a_short_question_does_not_wait_for_packages_that_it_does_not_use(tmp_path, words, unused):
    """simonw/llm#1282, codalab/codalab-worksheets#3211: `--version` took seconds, all of them imports."""
    if words[0] == "ls":
        small_dataset(str(tmp_path / "repo"), "pets", samples=4)
        words = [*words, str(tmp_path / "repo")]
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert not unused & set(done.stdout.split())
    assert "typer" in done.stdout.split()


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = datasvc.open(str(tmp_path_factory.mktemp("commands") / "repo"), create=True)
    for name in ("pets", "pearls"):
        small_dataset(repo, name, samples=4)
    small_dataset(repo, "pets", samples=5)
    repo.datasets.tag("pets@1", "stable")
    repo.models.save("net", {"weight": torch.zeros(2)}, step=1)
    return repo


def complete(repo, *words, repository=None):
    """Return what bash shows for words, the last of which is completed; bash takes references apart at "@"."""
    parts = "\n".join(words).replace("@", "\n@\n").rstrip("\n").split("\n") if words[-1] else [*words]
    return run(
        COMP_WORDS="\n".join(parts),
        COMP_CWORD=len(parts) - 1,
        _DATASVC_COMPLETE="complete_bash",
        DATASVC_REPO=repository or repo.repository.url,
    )


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["show", "pe"], ["pearls", "pets"]),
        (["show", "pet"], ["pets"]),
        (["show", ""], ["pearls", "pets"]),
        (["show", "pets@"], ["@stable", "@2", "@1"]),
        (["diff", "pets@1", "pets@s"], ["@stable"]),
        (["models", "show", "n"], ["net"]),
        (["models", "show", "net@"], ["@1"]),
    ],
)
def test_the_shell_completes_the_names_of_the_repository(repo, words, completed):
    """fastapi/typer#951: what a completion runs must be quick, and print nothing but its words."""
    done = complete(repo, "datasvc", *words)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, completed, "")


@pytest.mark.parametrize("repository", ["/nowhere/at/all", "s3://bucket/never", "ab:cd", "file"])
def test_a_completion_that_fails_prints_nothing_into_the_command_line(repo, repository):
    """fastapi/typer#286, click-contrib/click-completion#36: an error of a completion was typed into the prompt."""
    done = complete(repo, "datasvc", "show", "pe", repository=repository)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "pets@2"],
        ["models", "rm", "net@1"],
        ["rename", "pets", "animals"],
        ["delete", "pets", "--where", "label = 0"],
        ["gc"],
        ["models", "gc"],
        ["models", "retain", "net", "--last", "1"],
    ],
)
def test_what_removes_something_has_one_way_to_show_it_and_one_to_do_it(repo, words):
    """kubernetes/kops#127: `--yes` of one command was `--dryrun` of the next."""
    where = ["--repo", repo.repository.url]
    before = [repo.datasets.versions("pets"), repo.models.versions("net"), repo.datasets.names()]
    shown = run(*words, "--dry-run", *where)
    assert shown.returncode == 0, shown.stderr
    assert before == [repo.datasets.versions("pets"), repo.models.versions("net"), repo.datasets.names()]
    both = run(*words, "--dry-run", "--yes", *where)
    assert (both.returncode, "give one of them" in both.stderr) == (2, True)
    assert "--yes" in run(*words[: 2 if words[0] == "models" else 1], "-h").stdout


def test_a_table_in_a_pipe_says_what_its_columns_are(repo):
    """A table without a head has to be guessed by those who read the script."""
    lines = [line.split("\t") for line in run("ls", "--repo", repo.repository.url).stdout.splitlines()]
    assert lines[0] == ["name", "version", "samples", "bytes", "tags"]
    assert [line[0] for line in lines[1:]] == ["pearls", "pets"]


def test_the_help_has_sections_and_each_command_stands_in_one():
    """Thirty-seven commands in one list are read by few."""
    shown = run("-h").stdout
    titles = ["Data sets", "Models and training", "Nodes", "Look", "Maintenance"]
    places = [shown.index(f" {title} ") for title in titles]
    assert places == sorted(places)
    assert places[1] < shown.index(" models ") < places[2]
    assert run("models", "ls", "-h").returncode == 0


def test_the_help_of_train_lists_the_models_and_speaks_of_options():
    """Names of Python objects say nothing to a person at a prompt who has options."""
    help_text = options._make_parser("datasvc train").format_help()
    words = " ".join(help_text.split())
    assert all(f" {name}" in words for name in MODELS)
    assert not re.search(r"\bNone\b|models\.MODELS|see `[A-Z]", help_text)
    assert "datasvc-run -np 2 datasvc train" in words


def test_the_doctor_says_first_what_is_wrong(monkeypatch):
    """What is wrong stood among thirty lines that are well."""
    found = [
        Finding("a", "ok", "fine"),
        Finding("b", "warning", "slow"),
        Finding("c", "problem", "broken", "mend it"),
    ]
    monkeypatch.setattr("datasvc.doctor.examine", lambda **_: iter(found))
    done = run("doctor")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["problem", "->", "warning", "ok"]


@pytest.mark.parametrize(
    "config",
    [
        {"huggingface": {"model_type": "bert", "hidden_size": 8}, "rate": 0.1},
        {"model_type": "bert", "hidden_size": 8},
        {"rate": 0.1, "model": {"model_type": "bert", "hidden_size": 8}},
    ],
)
def test_an_export_for_transformers_has_the_configuration_wherever_it_was_saved(tmp_path, config):
    """huggingface/transformers#42381: a folder whose config.json has no model_type cannot be loaded by AutoModel."""
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.models.save("net", {"weight": torch.zeros(2)}, step=1, config=config)
    done = run("models", "export", "net", tmp_path / "out", "--format", "huggingface", "--repo", tmp_path / "repo")
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["hidden_size"]) == ("bert", 8)


def test_an_export_for_transformers_without_a_configuration_says_so(repo, tmp_path):
    """valuesimplex/FinBERT#13: the folder was handed on, and the next person met the error."""
    url = repo.repository.url
    done = run("models", "export", "net", tmp_path / "out", "--format", "huggingface", "--repo", url)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: no config.json was written")
    assert "model.config.to_dict()" in done.stderr


def test_the_first_ingest_of_the_readme_runs_as_it_is_written(tmp_path):
    """A newcomer copied the line, and met a missing option."""
    (written,) = re.findall(r"`datasvc (ingest ./photos [^`]*)`", (ROOT / "README.md").read_text())
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.jpg").write_bytes(encode_jpeg())
    done = run(*(word.replace("./", f"{tmp_path}/") for word in shlex.split(written)))
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["committed", "pets@1:"])

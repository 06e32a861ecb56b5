"""Text of users is shown as it is on a terminal: brackets are no markup, and control characters are escaped."""

import os
import re
import sys

import pytest

from datasvc.cli.main import main
from datasvc.cli.terminal.output import print_table
from datasvc.progress import byte_progress
from datasvc.trainer.recipes.reporting.events import TerminalEvents
from tests.cli.command import run
from tests.models.entries import commit_entry
from tests.shards.written_versions import write_version
from tests.support.terminals import read_terminal

ODD = "moved to [/data] [train] [bold]x \x1b[31mred\x07\nnext \N{SNOWMAN}"
SHOWN = r"moved to [/data] [train] [bold]x \x1b[31mred\x07\nnext " + "\N{SNOWMAN}"


def on_terminal(monkeypatch, function):
    """Return what a function writes on a terminal of 400 columns, without the styles of the terminal."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = os.openpty()
    with open(follower, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        function()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read_terminal(leader))


def command(monkeypatch, *words):
    def call():
        monkeypatch.setattr(sys, "argv", ["datasvc", *map(str, words)])
        with pytest.raises(SystemExit):
            main()

    return on_terminal(monkeypatch, call)


@pytest.fixture
def odd(repository):
    commit_entry(repository, "cnn", message=ODD, metrics={"[/top1]": 0.5}, config={ODD: ODD})
    commit_entry(repository, "cnn", message="", parent="cnn@1", metrics={"[/top1]": 0.75})
    samples = {"train": [[{"key": ODD, "text": ODD}]]}
    write_version(repository, "pets", samples)
    repository.versions("datasets", "pets").append(
        lambda _head: {**repository.versions("datasets", "pets").read(1).content, "message": ODD}
    )
    return repository


@pytest.mark.parametrize(
    "words",
    [
        ["log", "pets"],
        ["head", "pets"],
        ["sql", "pets", 'select text as "[/x]" from train'],
        ["show", "pets"],
        ["models", "log", "cnn"],
        ["models", "show", "cnn@1"],
        ["models", "lineage", "cnn@1"],
        ["models", "diff", "cnn@1", "cnn@2"],
        ["models", "sql", "select message from versions"],
    ],
)  # fmt: skip
def test_brackets_stay_and_control_characters_are_escaped(odd, monkeypatch, words):
    seen = command(monkeypatch, *words, "--repo", odd.url)
    assert SHOWN in seen, seen
    assert not set(seen) & {"\x1b", "\x07"}


@pytest.mark.parametrize(
    "words", [["models", "ls"], ["models", "find", "step = 0"], ["models", "retain", "cnn", "--last", "1"]]
)
def test_names_of_metrics_are_no_markup(odd, monkeypatch, words):
    assert "[/top1] 0.75" in command(monkeypatch, *words, "--repo", odd.url)


def test_an_error_shows_names_from_outside_without_their_control_characters(odd, monkeypatch):
    assert r"\x1b[31mred [/x] (it has no" in run("ls", "--repo", "\x1b[31mred [/x]").stderr
    assert "column" in run("models", "find", "nothing\x07", "--repo", odd.url).stderr


def test_a_long_word_of_a_table_is_folded_and_not_cut(monkeypatch):
    url = "s3://bucket/" + "x" * 600
    seen = on_terminal(monkeypatch, lambda: print_table(("[/url]", "n"), [(url, 1)]))
    assert "[/url]" in seen
    assert seen.count("x") == 600


def test_titles_of_bars_and_events_of_a_training_are_plain_text(monkeypatch):
    def show():
        with byte_progress(ODD):
            pass
        TerminalEvents(sys.stdout).report("checkpoint", message=ODD)

    seen = on_terminal(monkeypatch, show)
    assert seen.count(SHOWN) >= 2

"""`datasvc train` as a user runs it: the training program under a shorter name."""

import pytest

from datasvc.trainer.__main__ import main
from tests.cli import command


@pytest.mark.parametrize("words", [["--preset", "jia2018", "--show-config"], ["--data", "d"], ["--help"]])
def test_it_is_the_training_program(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("DATASVC_REPO", raising=False)
    done = command.run("train", *words)
    status = 0
    try:
        main(words, prog="datasvc train")
    except SystemExit as end:
        status = end.code or 0
    assert (done.returncode, done.stdout, done.stderr) == (status, *capsys.readouterr())
    assert done.stdout or "required: --repo, --name" in done.stderr

"""Terminals, containers and pipes whose encoding does not have the characters of the data."""

import io
import json
import sys

import pytest

from datasvc.cli.main import main
from datasvc.shards import ingest
from datasvc.trainer import __main__ as training
from datasvc.trainer.launch import command_line
from tests.samples import jpeg


@pytest.fixture
def cafes(repository, tmp_path):
    for name, seed in (("caf\u00e9", 1), ("\u8336", 2), ("tea", 3)):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "0.jpg").write_bytes(jpeg(seed=seed))
    ingest(repository, str(tmp_path / "a"), "a")
    return str(tmp_path / "a")


def run(monkeypatch, tmp_path, encoding, *arguments):
    """Return the status and the output of a command whose standard output has an encoding."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "argv", ["datasvc", *arguments, "--repo", str(tmp_path / "repo")])
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    for stream in (out, err):
        stream.flush()
    return status, out.buffer.getvalue(), err.buffer.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "command",
    [
        ("show", "a"),
        ("head", "a"),
        ("sql", "a", "select * from classes"),
        ("histogram", "a", "label"),
        ("samples", "a"),
        ("log", "a"),
        ("ls",),
        ("verify", "a"),
    ],
    ids=" ".join,
)
def test_what_an_encoding_does_not_have_is_escaped(cafes, monkeypatch, tmp_path, encoding, command):
    """yadayada/acd_cli#168, cube-js/cube#10378: a traceback in a container whose locale is C."""
    status, out, _ = run(monkeypatch, tmp_path, encoding, *command)
    assert status == 0
    assert out.decode(encoding)


@pytest.mark.parametrize("command", [("show", "a"), ("samples", "a"), ("log", "a")], ids=" ".join)
def test_json_stays_json_in_ascii(cafes, monkeypatch, tmp_path, command):
    """yadayada/acd_cli#168: a program that reads the output gets the same values."""
    values = []
    for encoding in ("ascii", "utf-8"):
        status, out, _ = run(monkeypatch, tmp_path, encoding, *command, "--json")
        assert status == 0
        values.append(json.loads(out.decode(encoding)))
    assert values[0] == values[1]


def test_errors_and_warnings_are_escaped_too(cafes, monkeypatch, tmp_path):
    """cube-js/cube#10378: the message of the error was lost to an error of its own."""
    status, _, err = run(monkeypatch, tmp_path, "ascii", "show", "caf\u00e9")
    assert status == 2
    assert rb"caf\xe9" in err
    (tmp_path / "a" / "caf\u00e9" / "\u8336.txt").write_text("")
    (tmp_path / "a" / "caf\u00e9" / "bad.jpg").write_text("")
    status, _, err = run(monkeypatch, tmp_path, "ascii", "ingest", cafes, "b", "--on-bad", "skip")
    assert status == 6
    assert rb"caf\xe9/bad.jpg" in err


def test_the_launcher_and_the_training_program_escape_too(monkeypatch):
    """meta-llama/llama#119, meta-llama/llama#311: a job under a Latin-1 locale ended at a line of its own output."""
    err = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stderr", err)
    assert command_line.main(["-np", "1", "/no/caf\u00e9"]) == 127
    with pytest.raises(SystemExit):
        training.main(["--caf\u00e9"])
    err.flush()
    said = err.buffer.getvalue()
    assert rb"/no/caf\xe9" in said
    assert rb"--caf\xe9" in said

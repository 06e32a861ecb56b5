"""The command line without torch, DALI and the packages of other extras, as `pip install .` leaves it."""

import json
import subprocess
import sys

import pytest
import torch

from datasvc.models import save
from datasvc.testing import small_dataset
from tests.cli.command import ROOT

BLOCKED = (
    "torch",
    "duckdb",
    "nvidia",
    "simplejpeg",
    "cloudpickle",
    "jinja2",
    "yaml",
    "s3fs",
    "tokenizers",
    "cryptography",
    "ray",
)
# Runs each command of its input with these modules blocked, and prints status, output and errors as JSON.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

sys.modules.update(dict.fromkeys({blocked!r}))  # None: an import raises ModuleNotFoundError
from datasvc.cli.main import main

done = []
for words in json.load(sys.stdin):
    sys.argv = ["datasvc", *words]
    output, errors = io.StringIO(), io.StringIO()
    status = 0
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    done.append([status, output.getvalue(), errors.getvalue()])
json.dump(done, sys.stdout)
"""
WORKING = [
    ["ls"], ["show", "pets"], ["head", "pets"], ["samples", "pets"], ["log", "pets"], ["verify", "pets", "--deep"],
    ["delete", "pets", "--keys", "FOLDER/keys"],
    ["diff", "pets@1", "pets"],
    ["export", "pets@1", "FOLDER/out", "--format", "parquet"], ["gc"],
    ["stage", "pets", "--cache", "FOLDER/cache", "--budget", "10MB"], ["cache", "status", "--cache", "FOLDER/cache"],
    ["plan", "cache", "pets", "--budget", "10MB"],
    ["models", "ls"], ["models", "show", "net"], ["models", "log", "net"], ["models", "verify", "net"],
    ["models", "tag", "net", "prod"], ["models", "lineage", "net"],
    ["models", "diff", "net", "net@1"], ["models", "push", "net", "--to", "FOLDER/copy", "--create"],
    ["runs", "ls", "--json"], ["train", "--help"], ["doctor"], ["ingest", "SOURCE", "birds"],
    ["serve", "--help"], ["ui", "--help"],
]  # fmt: skip
REFUSED = [
    (["models", "restore", "net", "FOLDER/net"], "reading tensors needs torch", "torch"),
    (["models", "export", "net", "FOLDER/st", "--format", "safetensors"], "reading tensors needs torch", "torch"),
    (["train", "--data", "pets", "--name", "n"], "needs torch", "torch"),
    (["ingest", "SOURCE", "cats", "--decode-check"], "a decode check of JPEG files needs simplejpeg", "images"),
    (["sql", "pets", "select count(*) from train"], "a query in SQL needs duckdb", "sql"),
    (["delete", "pets", "--where", "label = 1"], "a query or condition in SQL needs duckdb", "sql"),
    (["models", "find", "step = 1"], "a query or condition in SQL needs duckdb", "sql"),
    (["models", "sql", "select 1"], "needs duckdb", "sql"),
    (["ui"], "the page needs jinja2", "ui"),
    (["ls", "--repo", "s3://bucket/repo"], "s3fs", "s3"),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What each command has done, by its words."""
    folder = tmp_path_factory.mktemp("without")
    pets = small_dataset(str(folder / "repo"), "pets", samples=8)
    (folder / "keys").write_text(f"{pets['train'][0]['key']}\n")
    from datasvc.repository import Repository

    repository = Repository.open(str(folder / "repo"))
    save(repository, "net", {"model": {"w": torch.arange(4.0)}}, step=1)
    write_jpegs(folder / "source")
    places = {"FOLDER": str(folder), "SOURCE": str(folder / "source")}
    commands = [*WORKING, *(words for words, _, _ in REFUSED)]
    sent = [[place(word, places) for word in words] for words in commands]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=BLOCKED)],
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"DATASVC_REPO": str(folder / "repo"), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "HOME": str(folder)},
    )
    assert ended.returncode == 0, ended.stderr
    return {" ".join(words): result for words, result in zip(commands, json.loads(ended.stdout), strict=True)}


def place(word, places):
    for name, path in places.items():
        word = word.replace(name, path)
    return word


def write_jpegs(folder):
    from PIL import Image

    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), "red" if name == "a" else "blue").save(folder / name / "1.jpg")


@pytest.mark.parametrize("words", WORKING, ids=" ".join)
def test_a_command_that_needs_no_extra_works_without_any(words, done):
    status, output, errors = done[" ".join(words)]
    assert status == 0, errors
    assert output


@pytest.mark.parametrize(
    ("words", "reason", "extra"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else None
)
def test_a_command_that_needs_an_extra_names_it_once(words, reason, extra, done):
    status, _, errors = done[" ".join(words)]
    assert status == 2, errors
    assert errors.startswith("error: ")
    assert reason in errors
    assert errors.count(f"pip install '.[{extra}]'") == errors.count("pip install '.[") == 1
    assert "Traceback" not in errors

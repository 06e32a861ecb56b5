"""show, head and sql as a user runs them."""

import csv
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from datasvc.cli.datasets.show import histogram_lines
from datasvc.cli.terminal.output import _unique_names, short_text_value
from datasvc.printable import json_value, text_value
from datasvc.shards import ingest
from datasvc.shards.format.schema import image_schema, shard_schema
from datasvc.shards.versions.delete import delete
from tests.cli.command import run
from tests.samples import jpeg
from tests.shards.written_versions import write_version

ROOT = Path(__file__).parents[3]


def datasvc(*arguments, repo=None):
    return run(*arguments, DATASVC_REPO=repo)


def said(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def pets(repository):
    samples = [
        {"key": f"k{number}", "image": jpeg(seed=number), "width": 40, "height": 30, "label": number % 2}
        for number in range(5)
    ]
    splits = {"train": [samples[:3], samples[3:]], "val": [samples[:1]]}
    write_version(repository, "pets", splits, image_schema(labelled=True), ("cat", "dog"), message="first")
    return repository


def test_show_says_where_a_version_came_from_and_what_is_in_it(pets):
    delete(pets, "pets", keys=["k0"], split="train")
    shown = datasvc("show", "pets", repo=pets.url).stdout
    for line in (
        "version: pets@2",
        "parent: pets@1",
        "  kind: delete",
        "split train:",
        "  samples: 4",
        "  deleted: 1",
    ):
        assert line in shown
    assert "    image: large_binary" in shown
    assert "  classes: 2\n    cat  2 " in shown
    first = said(datasvc("show", "pets@1", "--json", repo=pets.url))
    assert (first["version"], first["message"], first["splits"]["train"]["samples"]) == ("pets@1", "first", 5)
    assert first["splits"]["train"]["class_counts"] == {"cat": 3, "dog": 2}


def test_a_histogram_shows_the_largest_classes_and_sums_up_the_rest():
    lines = histogram_lines({f"c{number}": number for number in range(25)})
    assert len(lines) == 21
    assert lines[0] == "c24  24 " + "\N{FULL BLOCK}" * 40
    assert lines[12] == "c12  12 " + "\N{FULL BLOCK}" * 20
    assert lines[-1] == f"and 5 more: {sum(range(5))}"
    assert histogram_lines({}) == []
    assert histogram_lines({"none": 0}) == ["none  0 "]


def test_head_gives_the_first_samples(pets):
    shown = datasvc("head", "pets", "-n", "2", repo=pets.url).stdout
    assert [line for line in shown.splitlines() if not line.startswith(" ")] == ["train/k0:", "train/k1:", "val/k0:"]
    assert f"  image: {len(jpeg(seed=1))} bytes" in shown
    assert "  class: dog" in shown
    assert "\x1b" not in shown
    (only,) = said(datasvc("head", "pets", "--split", "val", "--json", repo=pets.url))
    assert only == {
        "split": "val",
        "key": "k0",
        "class": "cat",
        "values": {"width": 40, "height": 30, "label": 0, "image": {"bytes": len(jpeg(seed=0))}},
    }


def test_head_writes_a_contact_sheet(pets, tmp_path):
    path = tmp_path / "sheet.html"
    done = datasvc("head", "pets", "--html", path, repo=pets.url)
    assert done.stdout == f"wrote 6 samples of pets@1 to {path}\n"
    assert path.read_text().count("<img") == 6
    assert said(datasvc("head", "pets", "-n", "1", "--html", path, "--json", repo=pets.url))["samples"] == 2
    assert datasvc("head", "pets", "--html", tmp_path / "no" / "x.html", repo=pets.url).returncode == 1


def read_all(descriptor):
    """Return what was written to the other end of a pseudo-terminal until that was closed."""
    parts = []
    while True:
        try:
            part = os.read(descriptor, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def head_on_a_terminal(pets, **environment):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "datasvc.cli.main", "head", "pets", "-n", "1", "--repo", pets.url],
        stdout=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", "COLORTERM": "truecolor", **environment},
        cwd=ROOT,
    ) as process:
        os.close(theirs)
        shown = read_all(ours)
    os.close(ours)
    assert process.returncode == 0
    return shown


def test_head_draws_images_on_a_terminal_with_colours(pets):
    shown = head_on_a_terminal(pets, DATASVC_IMAGES="blocks")
    assert shown.count("\N{UPPER HALF BLOCK}".encode()) == 2 * 40 * 15
    assert b"\x1b[38;2;" in shown


@pytest.mark.slow
def test_head_draws_pixels_where_the_terminal_has_them(pets):
    shown = head_on_a_terminal(pets, TERM="xterm-kitty", DATASVC_IMAGES="")
    assert shown.count(b"\x1b_Ga=T,") == 2
    assert "\N{UPPER HALF BLOCK}".encode() not in shown


def test_sql_prints_tables_csv_and_json(pets):
    query = "select key, label, image from train where label = 1 order by key"
    size = len(jpeg(seed=1))
    assert datasvc("sql", "pets", query, repo=pets.url).stdout.splitlines()[1] == f"k1\t1\t{size} bytes"
    rows = list(csv.reader(io.StringIO(datasvc("sql", "pets", query, "--csv", repo=pets.url).stdout)))
    assert rows[:2] == [["key", "label", "image"], ["k1", "1", f"{size} bytes"]]
    found = said(datasvc("sql", "pets", query, "--json", repo=pets.url))
    assert found[0] == {"key": "k1", "label": 1, "image": {"bytes": size}}
    assert said(datasvc("sql", "pets", "select sum(label) s, 1 a, 2 a from train", "--json", repo=pets.url)) == [
        {"s": 2, "a": 1, "a_1": 2}
    ]


def test_csv_keeps_what_commas_quotes_and_line_ends_stand_in(repository):
    text = 'a,"b"\nc\x1b[31m'
    write_version(repository, "texts", {"train": [[{"key": "k", "text": text}]]})
    done = datasvc("sql", "texts", "select text, [1, 2] l, null n from train", "--csv", repo=repository.url)
    assert list(csv.reader(io.StringIO(done.stdout))) == [["text", "l", "n"], [text, "[1, 2]", ""]]


def test_texts_of_samples_cannot_command_the_terminal(repository):
    schema = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("text", pa.string())])
    write_version(repository, "texts", {"train": [[{"key": "k\x1b[2J", "text": "x\n\x07y"}]]}, schema)
    for arguments in (("head", "texts"), ("sql", "texts", "from train")):
        shown = datasvc(*arguments, repo=repository.url).stdout
        assert "\x1b" not in shown
        assert r"k\x1b[2J" in shown
        assert r"x\n\x07y" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sql", "pets", "select nothing"], 2, "nothing"),
        (["sql", "pets", "select 1", "--csv", "--json"], 2, "exclude each other"),
        (["sql", "cats", "select 1"], 1, "no data set 'cats'"),
        (["head", "pets", "--split", "test"], 1, "has no split 'test'; it has: train, val"),
        (["head", "pets", "-n", "-1"], 2, "-n"),
    ],
)
def test_errors_say_what_to_do_and_nothing_else(pets, arguments, code, message):
    done = datasvc(*arguments, repo=pets.url)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"123", {"bytes": 3}),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ([1, {"a": b"x", "b": None}], [1, {"a": {"bytes": 1}, "b": None}]),
        (True, True),
        ("text", "text"),
    ],
)
def test_values_become_json(value, expected):
    assert json_value(value) == expected
    assert json.loads(json.dumps(json_value(value), allow_nan=False)) == expected


def test_values_of_other_types_become_text():
    import datetime as dt
    from decimal import Decimal

    assert json_value(dt.date(2024, 2, 29)) == "2024-02-29"
    assert json_value(Decimal("1.50")) == "1.50"
    assert json_value(Decimal(10**30)) == 10**30
    assert text_value(b"12") == "2 bytes"
    assert text_value(None) == "null"
    assert text_value([{"a": True}, "b", 0.5]) == '[{"a": true}, "b", 0.5]'
    assert text_value({"date": dt.date(2024, 2, 29)}) == '{"date": "2024-02-29"}'
    assert text_value("tab\there") == r"tab\there"


def test_columns_of_one_name_are_all_printed():
    assert _unique_names(["a", "a_2", "a", "a_1", "a"]) == ["a", "a_2", "a_3", "a_1", "a_4"]


def test_long_lists_are_shortened_and_an_empty_repository_is_named(repository):
    assert short_text_value(list(range(784))) == "[0, 1, 2, 3, 4, 5, 6, 7, ... 784 values]"
    assert short_text_value([[1, 2], ["a"]]) == "[[1, 2], [a]]"
    assert short_text_value({"x": None, "y": "tab\there"}) == r'{"x": null, "y": tab\there}'
    listed = datasvc("ls", repo=repository.url)
    assert (listed.returncode, listed.stdout) == (0, "")
    assert f"no data sets in {repository.url}; `datasvc ingest SOURCE NAME` creates one" in listed.stderr
    assert said(datasvc("ls", "--json", repo=repository.url)) == []
    assert "no models in" in datasvc("models", "ls", repo=repository.url).stderr
    ingest(repository, [{"x": list(range(784))}], "rows")
    assert "x: [0, 1, 2, 3, 4, 5, 6, 7, ... 784 values]\n" in datasvc("head", "rows", repo=repository.url).stdout


def test_show_imports_nothing_that_only_an_ingest_or_a_query_needs(repository):
    write_version(repository, "texts", {"train": [[{"key": "a", "text": "b"}]]})
    heavy = ["torch", "duckdb", "PIL", "pyarrow.dataset", "pyarrow.parquet", "aiohttp", "multiprocessing.pool"]
    heavy += ["datasvc.shards.ingestion", "datasvc.shards.sources", "datasvc.models.saving"]
    heavy += ["datasvc.cli.models", "datasvc.cli.nodes", "datasvc.cli.datasets.ingest"]  # commands that do not run
    code = "import atexit, sys; from datasvc.cli.main import main; "
    code += f"atexit.register(lambda: print('loaded', [name for name in {heavy!r} if name in sys.modules])); main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "show", "texts", "--repo", repository.url],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "loaded []"

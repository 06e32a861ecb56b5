"""Numbers in CSV, JSON lines and Parquet keep their value, and codes of digits stay text."""

import datetime as dt
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.choose import open_source
from tests.shards.sources.reading import read_all


def read(tmp_path, content, extension="csv", **options):
    """Return the samples without their keys, and the reasons of bad ones."""
    path = tmp_path / f"a.{extension}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    samples, bad = read_all(open_source(str(path), SourceOptions(**options)))
    return samples.drop(["key"]).to_pylist(), [sample.reason for sample in bad]


def column(tmp_path, *values, **options):
    """Return the values of a column of a CSV file beside one of plain numbers."""
    rows, bad = read(tmp_path, "code,n\n" + "".join(f"{value},1\n" for value in values), **options)
    return [row["code"] for row in rows], bad


@pytest.mark.parametrize(
    "values",
    [
        ["01234", "12345"], ["12345", "01234"], ["+49", "50"], ["1E5", "2E10"], ["1E5", "17"], ["0x1F", "0x20"],
        ["-01", "2"], ["00.5", "1.5"], ["18446744073709551616", "18446744073709551617"],
        ["-9223372036854775809", "1"],
    ],
)  # fmt: skip
def test_codes_of_digits_stay_text(tmp_path, values):
    """wireservice/csvkit#977, productdevbook/hucre#52: codes with leading zeros are read as numbers."""
    assert column(tmp_path, *values) == (values, [])


@pytest.mark.parametrize("texts", [["123", "456"], ["1E5", "2.5"], ["true", "false"], ["2020-01-01", "NA"]])
def test_a_quoted_column_beside_others_is_text(tmp_path, texts):
    """duckdb/duckdb#15376, nushell/nushell#16987, apache/arrow#46853: quotes mark text, but types are inferred."""
    assert column(tmp_path, *(f'"{text}"' for text in texts)) == (texts, [])


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_quotes_around_every_value_say_nothing_about_types(tmp_path, mark):
    """NVIDIA/cudf#12588: files of programs that quote everything lose their numbers, though they mark no text."""
    rows, bad = read(tmp_path, mark + '"id","label","code"\n"1","0","007"\n"2","1","008"\n')
    assert (rows, bad) == ([{"id": 1, "label": 0, "code": "007"}, {"id": 2, "label": 1, "code": "008"}], [])


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        (["5", "0"], [5, 0]), (["0.5", "1e5", "-0.25"], [0.5, 1e5, -0.25]), (["1e+16", "1"], [1e16, 1.0]),
        (["inf", "-inf"], [float("inf"), -float("inf")]), (["NA", "7"], [None, 7]), (["true", "NA"], [True, None]),
        (["9223372036854775808", "18446744073709551615", "1"], [2**63, 2**64 - 1, 1]),
    ],
)  # fmt: skip
def test_numbers_stay_numbers(tmp_path, values, numbers):
    """The other side of the same rule; pandas-dev/pandas#52505: integers of 64 bits are no floats."""
    assert column(tmp_path, *values) == (numbers, [])


@pytest.mark.parametrize(
    ("first", "late"), [("12345", "01234"), ("5", "+5"), ("5", "0x10"), ("0.5", "9007199254740993"), ("0.5", "1e999")]
)
def test_a_later_code_or_long_integer_in_a_column_of_numbers_is_a_bad_row(tmp_path, first, late):
    """duckdb/duckdb#15376: the types come from the first rows, and a later value does not fit them."""
    # More rows than the block of 1 MiB from which the types come.
    _, bad = read(tmp_path, "code,n\n" + f"{first},1\n" * 300_000 + f"{late},1\n")
    assert len(bad) == 1
    assert "column 'code'" in bad[0]
    assert late in bad[0]


def test_a_column_is_kept_as_text_on_request(tmp_path):
    """wireservice/csvkit#977: only all columns together can be kept from inference."""
    assert column(tmp_path, "1.10", "1.1", as_text=("code",)) == (["1.10", "1.1"], [])
    with pytest.raises(ConfigError, match=r"'gone'.*do not exist"):
        column(tmp_path, "1", as_text=("gone",))


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_delimiter_is_named(tmp_path, delimiter):
    """datopian/datahub.io#35: files with semicolons, usual in some countries, are read as one column."""
    with pytest.raises(ConfigError, match=r"one column.*separated by"):
        read(tmp_path, delimiter.join(["a", "b"]) + "\n" + delimiter.join("12") + "\n")


def test_a_byte_order_mark_carriage_returns_and_repeated_names(tmp_path):
    """What spreadsheets write: the mark is no part of the first name, and names are unique."""
    assert read(tmp_path, b"\xef\xbb\xbfcode,n\r\n007,1\r\n") == ([{"code": "007", "n": 1}], [])
    assert read(tmp_path, "code,n\n007,1\n008\n009,1,2\n")[0] == [{"code": "007", "n": 1}]
    with pytest.raises(ConfigError, match="two columns called"):
        read(tmp_path, "a,a\n1,2\n")


def lines(*values):
    return "".join(json.dumps({"id": value}) + "\n" for value in values)


def test_long_integers_of_json_lines_keep_their_value(tmp_path):
    """pandas-dev/pandas#52505, apache/arrow-rs#4697: ids of 19 digits become floats, and different ids equal."""
    ids = [2**63 + number for number in range(5)]
    assert read(tmp_path, lines(*ids, 1), "jsonl") == ([{"id": value} for value in [*ids, 1]], [])
    rows, bad = read(tmp_path, lines(0.5, 2**53 + 1, 2**53, [1][0]), "jsonl")
    assert [row["id"] for row in rows] == [0.5, 2.0**53, 1.0]
    assert len(bad) == 1
    assert "9007199254740993" in bad[0]
    rows, bad = read(tmp_path, lines([0.5], [2**53 + 1]), "jsonl")
    assert (rows, len(bad)) == ([{"id": [0.5]}], 1)
    with pytest.raises(ConfigError, match=r"'id' of a.jsonl holds integers from 1 to 18446744073709551616.*as text"):
        read(tmp_path, lines(1, 2**64), "jsonl")


def test_two_splits_of_json_lines_with_short_and_long_integers_have_one_type(tmp_path):
    """The neighbour: the type is joined over the splits, which Arrow does as int64."""
    (tmp_path / "train.jsonl").write_text(lines(2**63))
    (tmp_path / "val.jsonl").write_text(lines(1))
    samples, bad = read_all(open_source(str(tmp_path)))
    assert (sorted(samples.column("id").to_pylist()), bad) == ([1, 2**63], [])


def test_old_timestamps_of_spark_keep_their_year(tmp_path):
    """apache/datafusion#1360, StarRocks/starrocks#22355: INT96 beyond 2262 wraps when it is read as nanoseconds."""
    whens = [dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC), dt.datetime(1, 1, 1, tzinfo=dt.UTC)]
    naive = [when.replace(tzinfo=None) for when in whens]
    pq.write_table(
        pa.table({"when": pa.array(naive, pa.timestamp("us"))}),
        tmp_path / "a.parquet",
        use_deprecated_int96_timestamps=True,
    )
    samples, bad = read_all(open_source(str(tmp_path / "a.parquet")))
    assert (samples.column("when").to_pylist(), bad) == (naive, [])

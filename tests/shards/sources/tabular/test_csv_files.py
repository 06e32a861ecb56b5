import csv
import datetime as dt
import gzip
import io

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.tabular.csv_files import CsvSource
from tests.examples import examples
from tests.shards.sources.reading import read_all
from tests.shards.sources.source_laws import StreamedSourceLaws

PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def listed(tmp_path, content, **options):
    return CsvSource.list(str(write(tmp_path, "a.csv", content)), SourceOptions(**options))


def values(source):
    samples, bad = read_all(source)
    return samples.drop(["key"]).to_pylist(), {sample.key: sample.reason for sample in bad}


class TestCsvSource(StreamedSourceLaws):
    source = CsvSource
    name = "a.csv"
    is_cut_noticed = False  # the last line of a text may end anywhere

    def write(self, folder, numbers):
        content = "".join(f"{number},word {number}\n" for number in numbers)
        write(folder, self.name, PACKED[self.name[5:]](f"number,text\n{content}".encode()))


class TestGzipCsvSource(TestCsvSource):
    name = "a.csv.gz"
    is_cut_noticed = True


class TestZstdCsvSource(TestCsvSource):
    name = "a.csv.zst"
    is_cut_noticed = True


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\0"), max_size=12)


@examples(80)
@given(st.lists(st.tuples(TEXT, st.integers(-(1 << 62), 1 << 62), st.floats(allow_nan=False)), min_size=1), st.data())
def test_rows_are_what_the_csv_module_wrote(tmp_path_factory, rows, data):
    buffer = io.StringIO()
    writer = csv.writer(
        buffer, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])), quoting=csv.QUOTE_NONNUMERIC
    )
    writer.writerow(["text", "number", "part"])
    writer.writerows(rows)
    path = write(tmp_path_factory.mktemp("csv"), "a.csv", buffer.getvalue())
    samples, bad = read_all(CsvSource.list(str(path), texts=["text"]))
    assert not bad
    assert samples.column("key").to_pylist() == [f"a.csv#{number}" for number in range(len(rows))]
    assert list(zip(*(samples.column(name).to_pylist() for name in ("text", "number", "part")), strict=True)) == rows


def test_types_are_those_of_the_first_block(tmp_path):
    header = "i,f,b,d,t,s,z,n,text\n"
    line = "1,1.5,TRUE,2020-01-02,10:11:12,2020-01-02 03:04:05,2020-01-02T03:04:05Z,,NA\n"
    missing = "NA,,null,NULL,,nan,,,\n"
    source = listed(tmp_path, header + line + missing)
    found, bad = values(source)
    assert not bad
    moment = dt.datetime.fromisoformat("2020-01-02 03:04:05")
    assert found[0] == {
        "i": 1,
        "f": 1.5,
        "b": True,
        "d": dt.date(2020, 1, 2),
        "t": dt.time(10, 11, 12),
        "s": moment,
        "z": moment.replace(tzinfo=dt.UTC),
        "n": "",
        "text": "NA",
    }
    assert found[1] == {
        "i": None,
        "f": None,
        "b": None,
        "d": None,
        "t": None,
        "s": None,
        "z": None,
        "n": "",
        "text": "",
    }


def test_tabs_separate_a_tsv(tmp_path):
    path = write(tmp_path, "a.tsv", 'a\tb\n1,5\t"x\ty"\n')
    assert values(CsvSource.list(str(path))) == ([{"a": "1,5", "b": "x\ty"}], {})


def test_values_that_do_not_convert_are_bad_lines_and_the_others_stay(tmp_path):
    rows = [f"{number},{number}.5\n" for number in range(200_000)]
    rows[150_000] = "word,1.5\n"
    rows[150_007] = "7,half\n"
    found, bad = values(listed(tmp_path, "a,b\n" + "".join(rows)))
    assert bad.keys() == {"a.csv#150000", "a.csv#150007"}
    assert "row 150002 (the header is row 1): column 'a': b'word' is not a valid int64" in bad["a.csv#150000"]
    assert "row 150009 (the header is row 1): column 'b'" in bad["a.csv#150007"]
    assert [row["a"] for row in found] == [n for n in range(200_000) if n not in (150_000, 150_007)]


def test_lines_with_other_columns_are_bad_and_keep_the_numbers_of_the_others(tmp_path):
    rows = [f"{number},x\n" for number in range(200_000)]
    for number in (0, 5, 6, 120_000, 199_999):
        rows[number] = "alone\n" if number % 2 else "a,b,c\n"
    source = listed(tmp_path, "a,b\n" + "".join(rows))
    samples, bad = read_all(source)
    assert [sample.key for sample in bad] == [f"a.csv#{n}" for n in (0, 5, 6, 120_000, 199_999)]
    assert bad[0].reason == "row 2 (the header is row 1): expected 2 columns, found 3: 'a,b,c'"
    numbers = [int(key.partition("#")[2]) for key in samples.column("key").to_pylist()]
    assert numbers == samples.column("a").to_pylist()
    assert len(numbers) == 199_995


def test_text_that_is_not_utf8_is_a_bad_line(tmp_path):
    found, bad = values(listed(tmp_path, b"t\ngood\ncaf\xe9\nfine\n"))
    assert found == [{"t": "good"}, {"t": "fine"}]
    assert bad.keys() == {"a.csv#1"}
    assert "UTF8" in bad["a.csv#1"]


def test_a_row_may_be_much_longer_than_a_block(tmp_path):
    long = "." * (3 << 20)
    rows = ["first,1\n"] * 5 + [f'"{long}\n{long}",2\n'] + ["last,3\n"] * 5
    found, bad = values(listed(tmp_path, "t,n\n" + "".join(rows)))
    assert not bad
    assert [row["n"] for row in found] == [1] * 5 + [2] + [3] * 5
    assert found[5]["t"] == f"{long}\n{long}"


def test_the_rows_before_a_long_one_come_once(tmp_path):
    rows = [f"{'x' * 100},{number}\n" for number in range(130_000)]
    rows[7] = "bad\n"
    rows[120_000] = f"{'.' * (4 << 20)},120000\n"  # behind the first block of the second size
    samples, bad = read_all(listed(tmp_path, "t,n\n" + "".join(rows)))
    assert [sample.key for sample in bad] == ["a.csv#7"]
    good = [number for number in range(130_000) if number != 7]
    assert samples.column("n").to_pylist() == good
    assert samples.column("key").to_pylist() == [f"a.csv#{number}" for number in good]


@pytest.mark.parametrize("num_lines", [10, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_quote_that_is_never_closed_is_named(tmp_path, num_lines):
    rows = ["word,1\n"] * 10 + ['"open,2\n'] + [f"{'.' * 1000},3\n"] * num_lines
    found, bad = values(listed(tmp_path, "t,n\n" + "".join(rows)))
    assert len(found) == 10
    ((key, reason),) = bad.items()
    assert key == "a.csv#10"
    assert "a quote that is not closed" in reason


def test_a_byte_order_mark_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path):
    assert values(listed(tmp_path, "\ufeffa,b\r\n\r\n1,x\r\n\r\n2,y")) == (
        [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
        {},
    )


@pytest.mark.parametrize("option", ["id", None])
def test_keys_keep_their_zeros(tmp_path, option):
    name = option or "key"
    samples, _ = read_all(listed(tmp_path, f"{name},x\n007,1\n010,2\n", key=option))
    assert samples.to_pylist() == [{"key": "007", "x": 1}, {"key": "010", "x": 2}]


def test_a_column_without_a_name_gets_one(tmp_path):
    assert values(listed(tmp_path, ",x\n0,5\n"))[0] == [{"column_0": 0, "x": 5}]


def test_files_may_order_their_columns_as_they_like(tmp_path):
    write(tmp_path, "a.csv", "x,y\n1,2\n")
    write(tmp_path, "b.csv", "y,x\n4,3\n")
    assert values(CsvSource.list(str(tmp_path)))[0] == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x,z\n1,2\n", r"columns of b\.csv differ from those of a\.csv: \['y'\] are missing and \['z'\] are extra"),
        ("x\n1\n", r"\['y'\] are missing"),
        ("x,x\n1,2\n", r"b\.csv has two columns called \['x'\]"),
        ("x,y\n1,2\n".encode("utf-16"), r"b\.csv is UTF-16"),
        ("x,caf\xe9\n1,2\n".encode("latin-1"), r"b\.csv.*not UTF-8"),
    ],
)
def test_a_file_whose_header_is_another_is_named(tmp_path, content, message):
    write(tmp_path, "a.csv", "x,y\n1,2\n")
    write(tmp_path, "b.csv", content)
    with pytest.raises(ConfigError, match=message):
        CsvSource.list(str(tmp_path))


def test_a_file_whose_lines_all_miss_its_header_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no line at the start of a\.csv.*expected 2 columns, found 1: '1;2'"):
        listed(tmp_path, "a,b\n1;2\n3;4\n")


def test_files_without_rows_are_passed_over_unless_all_are(tmp_path):
    write(tmp_path, "a.csv", "")
    write(tmp_path, "b.csv", "x\n")
    write(tmp_path, "c.csv.gz", gzip.compress(b""))
    with pytest.raises(NotFoundError, match="no samples"):
        CsvSource.list(str(tmp_path))
    write(tmp_path, "d.csv", "x\n1\n")
    assert values(CsvSource.list(str(tmp_path))) == ([{"x": 1}], {})


def test_a_header_that_changed_after_the_listing_is_an_error(tmp_path):
    source = listed(tmp_path, "x\n1\n")
    write(tmp_path, "a.csv", "y\n1\n")
    with pytest.raises(ConfigError, match="changed since it was listed"):
        read_all(source)


def test_a_large_file_is_read_in_little_memory(tmp_path):
    line = f"{'x' * 1000},1\n"
    source = listed(tmp_path, "t,n\n" + line * 60_000)
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for part in source.parts for _ in source.read(part)]
    assert max(held) < 16 << 20

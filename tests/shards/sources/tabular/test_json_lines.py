import gzip
import io
import json
from unittest import mock

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards.sources.common import streams
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.streams import read_line_blocks
from datasvc.shards.sources.tabular import json_lines
from datasvc.shards.sources.tabular.json_lines import JsonLinesSource
from tests.examples import examples
from tests.shards.sources.reading import read_all, to_memory
from tests.shards.sources.source_laws import StreamedSourceLaws

PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(samples):
    return "".join(f"{json.dumps(sample)}\n" for sample in samples)


def listed(tmp_path, content, **options):
    return JsonLinesSource.list(str(write(tmp_path, "a.jsonl", content)), SourceOptions(**options))


def values(source):
    samples, bad = read_all(source)
    return samples.drop(["key"]).to_pylist(), {sample.key: sample.reason for sample in bad}


class TestJsonLinesSource(StreamedSourceLaws):
    source = JsonLinesSource
    name = "a.jsonl"
    is_cut_noticed = False  # the last line of a text may end anywhere

    def write(self, folder, numbers):
        samples = [{"number": number, "text": f"word {number}"} for number in numbers]
        write(folder, self.name, PACKED[self.name[7:]](lines(samples).encode()))


class TestGzipJsonLinesSource(TestJsonLinesSource):
    name = "a.jsonl.gz"
    is_cut_noticed = True


class TestZstdJsonLinesSource(TestJsonLinesSource):
    name = "a.jsonl.zst"
    is_cut_noticed = True


TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
SAMPLE = st.fixed_dictionaries(
    {
        "number": st.integers(-(1 << 63), (1 << 63) - 1),
        "part": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "text": TEXT | st.sampled_from(["2020-01-01", "2020-01-01T10:00:00", "10:00"]),
        "tags": st.lists(TEXT, max_size=3),
        "turns": st.lists(st.fixed_dictionaries({"role": TEXT, "scores": st.lists(st.floats(0, 1))}), max_size=2),
    }
)


@examples(80)
@given(st.lists(SAMPLE, min_size=1, max_size=10))
def test_samples_are_the_objects_that_were_written(tmp_path_factory, samples):
    path = write(tmp_path_factory.mktemp("json"), "a.jsonl", lines(samples))
    found, bad = read_all(JsonLinesSource.list(str(path)))
    assert not bad
    assert found.drop(["key"]).to_pylist() == samples
    content = path.read_bytes()
    for key, sample in zip(found.column("key").to_pylist(), samples, strict=True):
        name, _, offset = key.partition("#")
        assert name == "a.jsonl"
        assert json.loads(content[int(offset) :].split(b"\n")[0]) == sample


def test_text_that_looks_like_dates_stays_text(tmp_path):
    samples = [{"a": "2020-01-01", "b": ["2020-01-01T10:00:00Z"], "c": {"d": "2020-01-01 10:00:00"}}]
    assert values(listed(tmp_path, lines(samples))) == (samples, {})


@examples(200)
@given(st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")), max_size=12), st.data())
def test_ranges_side_by_side_give_each_line_once(all_lines, data):
    content = b"\n".join(all_lines)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(content) - 1, 1)), max_size=5)))
    found = []
    for start, stop in zip([0, *cuts], [*cuts, None], strict=True):
        stream = io.BytesIO(content[max(start - 1, 0) :])
        for block in read_line_blocks(stream, start=start, stop=stop):
            assert content[block.offset : block.offset + len(block.content)] == block.content
            assert block.offset == 0 or content[block.offset - 1 : block.offset] == b"\n"
            found.append(block)
    assert b"".join(block.content for block in found) == content
    assert [block.offset for block in found] == sorted({block.offset for block in found})


def test_a_large_file_is_cut_into_ranges_that_hold_each_line_once(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "RANGE_BYTES", 1 << 20)
    samples = [{"x": number, "text": "." * (number % 700)} for number in range(10_000)]
    write(tmp_path, "a.jsonl", lines(samples))
    for url in (str(tmp_path), to_memory(tmp_path, "memory://json-ranges")):
        source = JsonLinesSource.list(url)
        assert len(source.parts) == 4
        assert sum(part.size_bytes for part in source.parts) == len(lines(samples))
        assert values(source) == (samples, {})


@pytest.mark.parametrize("packed", PACKED)
def test_keys_are_offsets_and_in_compressed_files_numbers_of_lines(tmp_path, packed):
    content = b'{"x": 1}\n\n{"x": 2}\n'
    write(tmp_path, f"a.jsonl{packed}", PACKED[packed](content))
    found, _ = read_all(JsonLinesSource.list(str(tmp_path)))
    assert [key.partition("#")[2] for key in found.column("key").to_pylist()] == (
        ["1", "3"] if packed else ["0", "10"]
    )


BAD_LINES = {
    b'{"x": 1': "not a JSON object",
    b"[1]": "not a JSON object",
    b"word": "not a JSON object",
    b'{"x": "one"}': "does not fit",
    b'{"x": 1.5}': "does not fit",
    b'{"x": 99999999999999999999}': "does not fit",
    b'{"y": 1}': r"unknown columns ['y']",
    b'{"s": {"b": 1}}': "does not fit",
    b'{"x": 1}{"x": 2}': "not a JSON object",
    b'{"x": 1, "x": 2}': "does not fit",
    b'{"t": "\xff"}': "UTF",
    b'{"t": "\\ud800"}': "does not fit",
    b'{"t": "\0"}': "not a JSON object",
    b'{"s": ' + b"[" * 100_000: "not a JSON object",
    b'{"z": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "not a JSON object",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: repr(line[:30]))
def test_a_bad_line_behind_the_first_is_named_and_the_others_stay(tmp_path, bad):
    good = [{"x": number, "t": "." * 2500, "s": {"a": [number]}} for number in range(1000)]  # types end at 1 MiB
    start = lines(good[:600]).encode()
    found, named = values(listed(tmp_path, start + bad + b"\n" + lines(good[600:]).encode()))
    assert found == good
    ((key, reason),) = named.items()
    assert key == f"a.jsonl#{len(start)}"
    assert BAD_LINES[bad] in reason
    assert len(reason) < 1000


def test_two_objects_on_one_line_and_none_on_another_are_not_taken_for_two_lines(tmp_path):
    found, bad = values(listed(tmp_path, '{"x": 0}\n{"x": 1}{"x": 2}\n{"x":\n{"x": 3}\n'))
    assert found == [{"x": 0}, {"x": 3}]
    assert bad.keys() == {"a.jsonl#9", "a.jsonl#26"}


def test_bad_lines_at_the_start_do_not_count_for_the_types(tmp_path):
    found, bad = values(listed(tmp_path, 'word\n{"x": 1}\n{"y": ["a"]}\n{"x": 2.5, "y": null}\n'))
    assert found == [{"x": 1.0, "y": None}, {"x": None, "y": ["a"]}, {"x": 2.5, "y": None}]
    assert bad.keys() == {"a.jsonl#0"}


def test_a_line_nested_absurdly_deep_is_no_crash_however_it_hides(tmp_path):
    hidden = json.dumps({"a": "]" * 200_000}).encode()[:-1] + b', "b": ' + b"[" * 150_000 + b"]" * 150_000 + b"}"
    found, bad = values(listed(tmp_path, hidden + b'\n{"x": 1}\n'))
    assert found == [{"x": 1}]
    assert bad.keys() == {"a.jsonl#0"}


def test_a_mark_blank_lines_returns_and_a_missing_last_newline_do_no_harm(tmp_path):
    content = b'\xef\xbb\xbf{"x": 1}\r\n\r\n  \r\n{"x": 2}\r\n\n{"x": 3}'
    found, bad = read_all(listed(tmp_path, content))
    assert not bad
    assert found.column("x").to_pylist() == [1, 2, 3]
    assert [int(key[8:]) for key in found.column("key").to_pylist()] == [0, 19, 30]


def test_a_line_that_is_too_long_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "LINE_BYTES", 3 << 20)
    long = json.dumps({"t": "." * (5 << 20)}) + "\n"
    fitting = json.dumps({"t": "." * (2 << 20)}) + "\n"
    content = '{"t": "a"}\n' + long + fitting + '{"t": "b"}\n' + long
    found, bad = values(listed(tmp_path, content))
    assert [len(sample["t"]) for sample in found] == [1, 2 << 20, 1]
    assert list(bad) == ["a.jsonl#11", f"a.jsonl#{11 + len(long) + len(fitting) + 11}"]
    assert "longer than" in bad["a.jsonl#11"]


@examples(300)
@given(st.lists(st.sampled_from([0, 1, 6, 7, 13]), max_size=12), st.integers(0, 60), st.booleans())
def test_too_long_lines_cost_no_line_beside_them(lengths, start, is_ended):
    all_lines = [b"%x" % (number % 16) * length + b"\n" for number, length in enumerate(lengths)]
    content = b"".join(all_lines)[: None if is_ended else -1]
    start = min(start, len(content))
    offsets = [sum(map(len, all_lines[:number])) for number in range(len(all_lines))]
    expected = [
        (offset, None if length > 6 else content[offset : offset + length + 1])
        for offset, length in zip(offsets, lengths, strict=True)
        if start <= offset < len(content)
    ]
    with mock.patch.multiple(streams, BLOCK_BYTES=4, LINE_BYTES=6):
        found, first_line = [], 1
        for block in read_line_blocks(io.BytesIO(content[max(start - 1, 0) :]), start=start):
            assert block.line == first_line + len(found)
            offset = block.offset
            for line in [None] if block.content is None else block.content.splitlines(keepends=True):
                found.append((offset, line))
                offset += len(line or b"")
    assert found == expected


def test_a_line_over_64_mib_is_read_in_bounded_pieces():
    class Endless(io.RawIOBase):
        largest = num_read = 0

        def read(self, size=-1):
            self.largest = max(self.largest, size)
            self.num_read += 1
            return b"." * size if self.num_read < 200 else b".\n{}\n" if self.num_read == 200 else b""

    stream = Endless()
    found = [(block.content, block.line) for block in read_line_blocks(stream)]
    assert found == [(None, 1), (b"{}\n", 2)]
    assert stream.largest <= 1 << 20


@pytest.mark.parametrize("content", ['[{"x": 1},\n{"x": 2}]', '\n [\n{"x": 1}]', '\ufeff[{"x": 1}]'])
def test_an_array_is_refused_with_a_way_out(tmp_path, content):
    write(tmp_path, "a.json", '{"x": 1}\n')
    write(tmp_path, "b.json", content)
    with pytest.raises(ConfigError, match=r"b\.json holds one array.*jq -c"):
        JsonLinesSource.list(str(tmp_path))


@pytest.mark.parametrize("content", ["word\nword\n", '{\n"x": 1\n}\n', "\x00\x01\x02", b"\xff\xfe{\0}\0"])
def test_a_file_without_objects_on_its_lines_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match=r"no line at the start of a\.jsonl is a JSON object"):
        listed(tmp_path, content)


@pytest.mark.parametrize("other", ['{"x": "1"}\n', '{"x": [1]}\n', '{"x": {"a": 1}}\n'])
def test_columns_of_several_types_are_refused(tmp_path, other):
    with pytest.raises(ConfigError, match=r"first lines of a\.jsonl differ in their types.*x"):
        listed(tmp_path, '{"x": 1}\n' + other)


def test_splits_share_their_columns_and_differing_types_are_named(tmp_path):
    write(tmp_path, "train.jsonl", '{"x": 1, "label": 3, "no": null}\n')
    write(tmp_path, "test.jsonl", '{"x": 1.5, "no": ["a"]}\n')
    source = JsonLinesSource.list(str(tmp_path))
    assert source.schema.field("label").type == pa.int32()
    found, bad = values(source)
    assert not bad
    assert found == [{"x": 1.5, "no": ["a"], "label": None}, {"x": 1.0, "no": None, "label": 3}]
    write(tmp_path, "val.jsonl", '{"x": "a"}\n')
    with pytest.raises(ConfigError, match=r"test\.jsonl and val\.jsonl differ in their types"):
        JsonLinesSource.list(str(tmp_path))


def test_a_key_column_serves(tmp_path):
    found, bad = read_all(listed(tmp_path, '{"id": 7, "x": 1}\n{"x": 2}\n', key="id"))
    assert found.to_pylist() == [{"key": "7", "x": 1}]
    assert [sample.key for sample in bad] == ["a.jsonl#18"]


def test_files_without_lines_are_passed_over_unless_all_are(tmp_path):
    write(tmp_path, "a.jsonl", "")
    write(tmp_path, "b.jsonl", "\n \n")
    write(tmp_path, "c.jsonl.gz", gzip.compress(b""))
    with pytest.raises(NotFoundError, match="no samples"):
        JsonLinesSource.list(str(tmp_path))
    write(tmp_path, "d.jsonl", '{"x": 1}\n')
    assert values(JsonLinesSource.list(str(tmp_path))) == ([{"x": 1}], {})


def test_descriptions_of_hugging_face_are_no_samples(tmp_path):
    write(tmp_path, "dataset_info.json", "{}")
    write(tmp_path, "a.json", '{"x": 1}\n')
    source = JsonLinesSource.list(str(tmp_path))
    assert [part.name for part in source.parts] == ["a.json"]
    assert source.ignored == {".json": 1}


@pytest.mark.slow
def test_a_large_file_is_read_in_little_memory(tmp_path):
    source = listed(tmp_path, lines([{"t": "." * 1000}]) * 60_000)
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for part in source.parts for _ in source.read(part)]
    assert max(held) < 16 << 20

import gzip
import inspect
import io
import json
import posixpath
import re
import sys
import tarfile
from dataclasses import replace

import fsspec
import pyarrow as pa
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, MissingPackageError, NotFoundError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample
from datasvc.shards.sources.tar import webdataset as module
from datasvc.shards.sources.tar.webdataset import WebDatasetSource, choose_columns, split_name
from tests.samples import jpeg
from tests.shards.sources.source_laws import StreamedSourceLaws


def tar_of(files, **options):
    """Return a tar of `files`: (name or TarInfo, content) pairs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:
        for name, content in files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def put(url, content):
    with fsspec.open(str(url), "wb", auto_mkdir=True) as file:
        file.write(content)
    return str(url)


def read(source):
    """Return all samples and all bad ones of a source, in its order."""
    samples, bad = [], []
    for part in source.parts:
        for found in source.read(part):
            if isinstance(found, BadSample):
                bad.append(found)
            else:
                assert found.schema == source.schema
                samples += found.to_pylist()
    return samples, bad


def read_tar(tmp_path, files, **options):
    return read(WebDatasetSource.list(put(tmp_path / "0.tar", tar_of(files, **options))))


def pets(*numbers):
    return [
        file
        for number in numbers
        for file in ((f"{number:04d}.jpg", jpeg(seed=number)), (f"{number:04d}.cls", str(number % 3).encode()))
    ]


def pet_samples(*numbers):
    return [{"key": f"{number:04d}", "image": jpeg(seed=number), "label": number % 3} for number in numbers]


class TestWebDatasetSource(StreamedSourceLaws):
    source = WebDatasetSource
    column, key = "label", None
    name = "0.tar"

    def write(self, folder, numbers):
        files = [(f"{number:03d}.{name}", str(number).encode()) for number in numbers for name in ("txt", "cls")]
        tar = tar_of(files)
        put(folder / self.name, gzip.compress(tar) if self.name.endswith("gz") else tar)


class TestGzipWebDatasetSource(TestWebDatasetSource):
    name = "0.tar.gz"


def test_images_and_classes_become_image_and_label(tmp_path):
    source = WebDatasetSource.list(put(tmp_path / "0.tar", tar_of(pets(1, 2, 3))))
    assert source.schema.names == ["key", "image", "label"]
    assert is_image(source.schema.field("image"))
    assert [source.schema.field(name).nullable for name in source.schema.names] == [False, False, True]
    assert source.schema.field("label").type == pa.int32()
    assert read(source) == (pet_samples(1, 2, 3), [])


@pytest.mark.parametrize("root", ["{tmp}", "memory://{tmp}/wds"])
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".tar", bytes), (".tar.gz", gzip.compress), (".tgz", gzip.compress), (".tar.zst", zstandard.compress)],
)
@pytest.mark.parametrize("pattern", ["", "/pets-{{000000..000002}}{suffix}", "/pets-*{suffix}"])
def test_tars_are_found_by_folder_pattern_and_braces_anywhere(root, suffix, pack, pattern, tmp_path):
    root = root.format(tmp=tmp_path)
    for number in range(3):
        put(f"{root}/pets-{number:06d}{suffix}", pack(tar_of(pets(2 * number, 2 * number + 1))))
    put(f"{root}/readme.md", b"hello")
    source = WebDatasetSource.list(root + pattern.format(suffix=suffix))
    assert [part.name for part in source.parts] == [f"pets-{number:06d}{suffix}" for number in range(3)]
    assert dict(source.ignored) == ({} if pattern else {".md": 1})
    assert read(source) == (pet_samples(*range(6)), [])


def test_splits_come_from_names_or_from_the_user(tmp_path):
    for name in ("train/a.tar", "val/a.tar", "pets-test-0.tar"):
        put(tmp_path / name, tar_of(pets(1)))
    source = WebDatasetSource.list(str(tmp_path))
    assert {part.name: part.split for part in source.parts} == {
        "train/a.tar": "train",
        "val/a.tar": "val",
        "pets-test-0.tar": "test",
    }
    assert {part.split for part in WebDatasetSource.list(str(tmp_path), SourceOptions(split="all")).parts} == {"all"}
    braces = WebDatasetSource.list(f"{tmp_path}/{{train,val}}/a.tar")
    assert [(part.name, part.split) for part in braces.parts] == [("train/a.tar", "train"), ("val/a.tar", "val")]


def test_every_kind_of_field_gets_its_column(tmp_path):
    meta = json.dumps({"b": [1, {"c": None}], "a": "ä"}, ensure_ascii=False)
    files = [
        ("x/1.jpg", jpeg()),
        ("x/1.seg.PNG", b"\x89PNG\r\n"),
        ("x/1.cls", b" 7\n"),
        ("x/1.fine.cls", b"123456789012"),
        ("x/1.txt", "ein Fuß".encode()),
        ("x/1.json", meta.encode()),
        ("x/1.npy", b"\0\1"),
    ]
    source = WebDatasetSource.list(put(tmp_path / "0.tar", tar_of(files)))
    assert read(source)[0] == [
        {
            "key": "x/1",
            "image": jpeg(),
            "seg.png": b"\x89PNG\r\n",
            "label": 7,
            "fine.cls": 123456789012,
            "txt": "ein Fuß",
            "json": meta,
            "npy": b"\0\1",
        }
    ]
    assert [field.name for field in source.schema if is_image(field)] == ["image", "seg.png"]


@pytest.mark.parametrize(
    ("samples", "columns", "nullable"),
    [
        ([["png"]], {"png": "image"}, []),
        ([["jpg"], ["png"]], {"jpg": "image", "png": "image", "webp": "image"}, []),
        ([["jpg"], ["png"], ["txt"]], {"jpg": "image", "png": "image"}, ["image", "txt"]),
        ([["jpg"]] * 9 + [["txt"]], {"jpg": "image"}, ["image", "txt"]),
        ([["jpg"]] * 10 + [["txt"]], {"jpg": "image"}, ["txt"]),
        ([["jpg", "a.png"]] * 20 + [["jpg"]], {"jpg": "image"}, ["a.png"]),
        ([["jpg", "png"], ["jpg"]], {"jpg": "jpg", "png": "png"}, ["png"]),
        ([["in.jpg", "x"]], {"in.jpg": "image", "x": "x"}, ["x"]),
        ([["in.jpg", "out.jpg"]], {"in.jpg": "in.jpg", "out.jpg": "out.jpg"}, []),
        ([["jpg", "seg.png"], ["jpg"]], {"jpg": "image", "seg.png": "seg.png"}, ["seg.png"]),
        ([["jpg", "width", "key"]], {"width": "source_width", "key": "source_key"}, ["source_width", "source_key"]),
        ([["image", "jpg"]], {"image": "source_image", "jpg": "image"}, ["source_image"]),
        ([["cls", "label"]], {"cls": "label", "label": "source_label"}, ["label", "source_label"]),
        ([["label", "height"]], {"label": "label", "height": "height"}, ["label", "height"]),
    ],
)
def test_fields_choose_columns(samples, columns, nullable):
    chosen, schema = choose_columns(samples)
    assert columns.items() <= chosen.items()
    assert [field.name for field in schema if field.nullable] == nullable
    assert len(set(schema.names)) == len(schema.names)


def test_one_image_may_have_another_type_in_each_sample_but_not_two(tmp_path):
    files = [("1.jpg", b"j"), ("2.png", b"p"), *[("3.webp", b"w"), ("3.jpg", b"j")], ("4.tiff", b"t")]
    put(tmp_path / "0.tar", tar_of(files[:2]))
    put(tmp_path / "1.tar", tar_of(files))
    source = WebDatasetSource.list(str(tmp_path / "0.tar"))
    (part,) = WebDatasetSource.list(str(tmp_path / "1.tar")).parts
    samples, bad = read(replace(source, url=str(tmp_path), parts=[part]))
    assert [(sample["key"], sample["image"]) for sample in samples] == [("1", b"j"), ("2", b"p"), ("4", b"t")]
    assert [found.key for found in bad] == ["3"]
    assert "'jpg', 'webp'" in bad[0].reason


def test_a_lone_sample_without_its_image_is_bad(tmp_path):
    samples, bad = read_tar(tmp_path, [*pets(*range(12)), ("x.cls", b"1")])
    assert samples == pet_samples(*range(12))
    assert [(found.key, found.reason) for found in bad] == [("x", "it has no image; its fields are ['cls']")]


def test_fields_missing_in_some_samples_are_null(tmp_path):
    samples, bad = read_tar(
        tmp_path, [("1.jpg", b"j"), ("1.txt", b"t"), ("2.jpg", b"k"), ("3.jpg", b"l"), ("3.cls", b"3")]
    )
    assert [(sample["txt"], sample["label"]) for sample in samples] == [("t", None), (None, None), (None, 3)]
    assert bad == []


def test_keys_that_are_not_neighbours_are_two_samples_as_in_webdataset(tmp_path):
    samples, _ = read_tar(tmp_path, [("1.txt", b"a"), ("2.txt", b"b"), ("1.cls", b"1")])
    assert [(sample["key"], sample["txt"], sample["label"]) for sample in samples] == [
        ("1", "a", None),
        ("2", "b", None),
        ("1", None, 1),
    ]


def test_hidden_meta_and_nameless_files_are_passed_over(tmp_path):
    files = [("__info__", b"{"), ("__x__/1.txt", b"?"), ("._1.txt", b"\xff"), ("a/.txt", b""), ("README", b"")]
    assert read_tar(tmp_path, [*files, ("1.txt", b"one")]) == ([{"key": "1", "txt": "one"}], [])


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([("b.jpg", b"1"), ("b.cls", b"two")], "'cls' is not an integer: b'two'"),
        ([("b.jpg", b"1"), ("b.cls", b"\xef\xbc\x92")], "is not an integer"),
        ([("b.jpg", b"1"), ("b.cls", b"")], "is not an integer"),
        ([("b.jpg", b"1"), ("b.cls", b"9" * 5000)], "is not an integer"),
        ([("b.jpg", b"1"), ("b.cls", b"9999999999")], "does not fit"),
        ([("b.jpg", b"1"), ("b.txt", b"\xff")], "'txt' is not UTF-8"),
        ([("b.jpg", b"1"), ("b.JPG", b"2"), ("b.cls", b"2")], "'jpg' occurs twice"),
        ([("b.jpg", b"1"), ("b.", b"")], "b. has no extension"),
        ([("../b.jpg", b"1")], "leads out of the tar"),
        ([("/b.jpg", b"1"), ("/b.cls", b"1")], "absolute"),
        ([("b\udcff.jpg", b"1")], "not UTF-8"),
    ],
)
def test_a_bad_sample_is_named_with_its_reason_and_the_others_are_read(files, says, tmp_path):
    around = [("a.jpg", b"A"), ("a.cls", b"0"), ("a.txt", b"")], [("c.jpg", b"C")]
    samples, bad = read_tar(tmp_path, [*around[0], *files, *around[1]], encoding="utf-8", errors="surrogateescape")
    assert [sample["key"] for sample in samples] == ["a", "c"]
    (only,) = bad
    assert only.split == "train"
    assert only.key.rpartition("/")[2].startswith("b")
    assert says in only.reason


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_sample_with_a_link_or_a_device_is_bad_as_a_whole_and_nothing_is_followed(kind, tmp_path):
    put(tmp_path / "secret", b"secret")
    info = tarfile.TarInfo("b.jpg")
    info.type, info.linkname = kind, str(tmp_path / "secret")
    files = [("a.jpg", b"A"), ("a.cls", b"1"), ("b.cls", b"1"), (info, b""), ("b.txt", b""), ("c.jpg", b"C")]
    samples, bad = read_tar(tmp_path, files)
    assert [sample["key"] for sample in samples] == ["a", "c"]
    assert [found.key for found in bad] == ["b"]
    assert "b.jpg is a " in bad[0].reason


def test_a_field_that_the_first_samples_did_not_have_makes_a_bad_sample_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_SAMPLES", 2)
    files = [("1.txt", b"1"), ("2.txt", b"2"), ("3.txt", b"3"), ("3.new", b"!"), ("4.txt", b"4")]
    samples, bad = read_tar(tmp_path, files)
    assert [sample["key"] for sample in samples] == ["1", "2", "4"]
    assert [found.key for found in bad] == ["3"]
    assert "'new' is in none of the first samples" in bad[0].reason


def test_bad_samples_do_not_use_up_the_bytes_in_which_the_columns_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_BYTES", 100)
    for number in range(3):
        put(tmp_path / f"{number}.tar", tar_of([(f"{number}.", b"x" * 200)]))  # no extension
    put(tmp_path / "3.tar", tar_of([("4.txt", b"4")]))
    samples, bad = read(WebDatasetSource.list(str(tmp_path)))
    assert [sample["key"] for sample in samples] == ["4"]
    assert len(bad) == 3


def test_columns_are_decided_by_several_parts_of_every_split(tmp_path):
    put(tmp_path / "train-0.tar", tar_of([("1.txt", b"1")]))
    put(tmp_path / "train-1.tar", tar_of([("2.txt", b"2"), ("2.a", b"a")]))
    put(tmp_path / "val-0.tar", tar_of([("3.b", b"b")]))
    assert WebDatasetSource.list(str(tmp_path)).schema.names == ["key", "txt", "a", "b"]


def test_a_truncated_tar_gives_what_is_whole_and_one_bad_sample_that_says_where(tmp_path):
    whole = tar_of(pets(1, 2, 3))
    put(tmp_path / "0.tar", tar_of(pets(0)))
    put(tmp_path / "1.tar", whole[: whole.index(b"0003.jpg") + 512 + 100])
    samples, bad = read(WebDatasetSource.list(str(tmp_path)))
    assert samples == pet_samples(0, 1, 2)
    (only,) = bad
    assert only.key == "1.tar"
    assert "truncated" in only.reason
    assert "'0003' may be incomplete" in only.reason


def test_the_sample_before_a_cut_is_not_taken_for_whole(tmp_path):
    whole = tar_of(pets(1, 2))
    put(tmp_path / "0.tar", whole[: whole.index(b"0002.cls")])
    samples, bad = read(WebDatasetSource.list(str(tmp_path)))
    assert samples == pet_samples(1)
    assert "'0002' may be incomplete" in bad[0].reason


def test_a_tar_that_shows_nothing_is_an_error_only_where_no_other_does(tmp_path):
    put(tmp_path / "0.tar", b"no tar")
    with pytest.raises(CorruptDataError, match=r"0\.tar is not a tar"):
        WebDatasetSource.list(str(tmp_path))
    put(tmp_path / "1.tar", tar_of(pets(1)))
    samples, bad = read(WebDatasetSource.list(str(tmp_path)))
    assert samples == pet_samples(1)
    assert [found.key for found in bad] == ["0.tar"]


def test_an_empty_tar_is_an_empty_part(tmp_path):
    put(tmp_path / "0.tar", tar_of([]))
    put(tmp_path / "1.tar", tar_of(pets(1)))
    assert read(WebDatasetSource.list(str(tmp_path))) == (pet_samples(1), [])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jpg", b"", "no tar among its 1 file"),
        ("a.tar", tar_of([]), "no sample in a.tar"),
        ("a.tar", tar_of([("README", b"hello")]), "such as 0001.jpg and 0001.cls"),
    ],
)
def test_a_source_without_samples_is_not_found(name, content, says, tmp_path):
    put(tmp_path / name, content)
    with pytest.raises(NotFoundError, match=says):
        WebDatasetSource.list(str(tmp_path))


def test_a_missing_tar_of_a_brace_pattern_is_not_found(tmp_path):
    put(tmp_path / "0.tar", tar_of(pets(1)))
    with pytest.raises(NotFoundError):
        WebDatasetSource.list(f"{tmp_path}/{{0..1}}.tar")


def test_a_sample_larger_than_the_limit_is_bad_and_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_MEMBER_BYTES", 1000)
    files = [("1.x", b"1"), ("2.x", bytes(1001)), ("3.x", bytes(600)), ("3.y", bytes(600)), ("4.x", bytes(1000))]
    samples, bad = read_tar(tmp_path, [*files, ("4.y", b"")])
    assert [sample["key"] for sample in samples] == ["1", "4"]
    assert [found.key for found in bad] == ["2", "3"]
    assert "with 2.x it is larger than 1000 bytes" in bad[0].reason


def test_batches_hold_at_most_a_mebibyte_or_one_sample(tmp_path):
    sizes = [300_000] * 7 + [3 * BATCH_BYTES, 1, BATCH_BYTES, 1, *[10] * (2 * BATCH_SAMPLES)]
    url = put(tmp_path / "0.tar", tar_of([(f"{number}.x", bytes(size)) for number, size in enumerate(sizes)]))
    source = WebDatasetSource.list(url)
    batches = list(source.read(source.parts[0]))
    assert sum(batch.num_rows for batch in batches) == len(sizes)
    for batch in batches:
        size = sum(len(value) for value in batch["x"].to_pylist())
        assert batch.num_rows == 1 or (size <= BATCH_BYTES and batch.num_rows <= BATCH_SAMPLES)


keys = st.lists(
    st.tuples(st.sampled_from(["", "a/", "a.b/c/"]), st.text("ab01_-ä", min_size=1, max_size=12)).map("".join),
    min_size=1,
    max_size=8,
    unique=True,
).filter(lambda keys: not any(key.startswith("__") for key in keys))
fields = st.fixed_dictionaries(
    {},
    optional={
        "jpg": st.binary(max_size=50).map(lambda end: b"\xff\xd8\xff" + end),
        "seg.png": st.binary(max_size=9),
        "cls": st.integers(-(1 << 31), (1 << 31) - 1),
        "txt": st.text(max_size=20),
        "json": st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
        "bin": st.binary(max_size=2000),
    },
).filter(bool)


@given(keys, st.data(), st.booleans())
def test_what_the_real_librarys_writer_writes_comes_back_equal(tmp_path_factory, keys, data, compress):
    library = pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("wds")
    written = [{"__key__": key, **data.draw(fields)} for key in keys]
    raw = [
        {
            name: json.dumps(value) if name == "json" else str(value) if name == "cls" else value
            for name, value in each.items()
        }
        for each in written
    ]
    path = folder / ("0.tar.gz" if compress else "0.tar")
    with library.TarWriter(str(path), encoder=False) as writer:
        for sample in raw:
            writer.write(
                {name: v.encode() if isinstance(v, str) and name[0] != "_" else v for name, v in sample.items()}
            )
    source = WebDatasetSource.list(str(path))
    samples, bad = read(source)
    assert bad == []
    back = {column: name for name, column in source.columns.items() if any(name in sample for sample in written)}
    found = [
        {back.get(name, name): value for name, value in sample.items() if value is not None} for sample in samples
    ]
    assert found == [
        {
            "key": each["__key__"],
            **{n: json.dumps(v) if n == "json" else v for n, v in each.items() if n != "__key__"},
        }
        for each in written
    ]


def test_the_real_library_groups_a_tar_as_we_do(tmp_path):
    library = pytest.importorskip("webdataset")
    files = [
        ("a.b/1.x", b"1"),
        ("a.b/1.y.Z", b"2"),
        ("c/2.x", b"3"),
        ("3", b""),
        ("./4.x", b"4"),
        ("__m__", b""),
        ("5.", b""),
    ]
    url = put(tmp_path / "0.tar", tar_of(files[:-1]))
    theirs = [
        {name: value for name, value in sample.items() if name not in {"__url__", "__local_path__"}}
        for sample in library.WebDataset(url, shardshuffle=False)
    ]
    ours = [
        {name: value for name, value in sample.items() if value is not None}
        for sample in read(WebDatasetSource.list(url))[0]
    ]
    assert [{"key": sample.pop("__key__"), **sample} for sample in theirs] == ours


@given(st.text("aB.-_/ ä", min_size=1, max_size=20))
@example("__.__")
@example("__a.b__/c.jpg")
def test_names_are_split_as_the_real_library_splits_them(path):
    library = pytest.importorskip("webdataset.tariterators")
    passed_over = inspect.signature(library.tar_file_iterator).parameters["skip_meta"].default
    if posixpath.basename(path).startswith(".") or re.match(passed_over, path):
        assert split_name(path) is None
        return
    key, extension = library.base_plus_ext(path)
    assert split_name(path) == (None if key is None else (key, extension.lower()))


@pytest.mark.parametrize(("field", "module"), [("mp4", "av"), ("flac", "soundfile")])
def test_media_whose_package_is_missing_can_stay_bytes(field, module, tmp_path, monkeypatch):
    url = put(tmp_path / "0.tar", tar_of([(f"0.{field}", b"encoded"), ("0.cls", b"3")]))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"'{field}' needs {module}.*pip install .*--as-bytes {field}"):
        WebDatasetSource.list(url)
    samples, bad = read(WebDatasetSource.list(url, SourceOptions(as_bytes=(field,))))
    assert (samples, bad) == ([{"key": "0", field: b"encoded", "label": 3}], [])
    with pytest.raises(ConfigError, match=r"has \['gone'\]; the fields of the first samples are \['cls'"):
        WebDatasetSource.list(url, SourceOptions(as_bytes=("gone",)))

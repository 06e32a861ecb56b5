import datetime as dt
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.images.manifest import ManifestSource
from tests.samples import jpeg
from tests.shards.sources.source_laws import ListedSourceLaws

NAMES = ["a.jpg", "sub/b.jpg", "train/c.jpg", "val/d.jpg", "_e.jpg"]


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for seed, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg(seed=seed))
    return folder


def listed(images, content, name="manifest.csv", **options):
    path = images.parent / name
    path.write_text(content)
    return ManifestSource.list(str(images), SourceOptions(manifest=str(path), **options))


def facts(source):
    """Return (key, label, values) of the files of each split."""
    return {split: [(file.key, file.label, file.values) for file in files] for split, files in source.splits.items()}


class TestManifestSource(ListedSourceLaws):
    source = ManifestSource
    ignored = {"not in the manifest": 1}  # noqa: RUF012 - never changed

    def write_splits(self, root, splits):
        rows = ["file,split"]
        for split, numbers in splits.items():
            for number in numbers:
                path = root / split / f"{number:03d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(jpeg(seed=number))
                rows.append(f"{split}/{path.name},{split}")
        (root / "manifest.csv").write_text("\n".join(rows))

    def options_at(self, url):
        return {"manifest": f"{url}/manifest.csv"}

    def one_split(self, root):
        return root


def test_a_csv_manifest_names_files_labels_splits_and_more(images):
    source = listed(
        images,
        "path,class,split,score,caption\n"
        "sub/b.jpg,dog,Train,0.5,two dogs\n"
        "a.jpg,cat,train,1,\n"
        "val/d.jpg,dog,test,,NA\n",
    )
    assert source.classes == ("cat", "dog")
    assert facts(source) == {
        "train": [("a.jpg", 0, (1.0, "")), ("sub/b.jpg", 1, (0.5, "two dogs"))],
        "test": [("val/d.jpg", 1, (None, "NA"))],
    }
    assert source.schema.names == ["key", "image", "label", "score", "caption"]
    assert source.schema.types[2:] == [pa.int32(), pa.float64(), pa.string()]
    assert is_image(source.schema.field("image"))
    assert not source.schema.field("label").nullable
    assert source.ignored == {"not in the manifest": 2}
    file = source.splits["train"][0]
    assert file.path == str(images / "a.jpg")
    assert file.size_bytes == len(jpeg(seed=0))
    assert file.stamp


def test_columns_of_a_parquet_manifest_keep_their_types(images):
    moment = dt.datetime.fromisoformat("2020-01-02 03:04:05")
    table = pa.table(
        {
            "file": NAMES[:2],
            "boxes": pa.array([[[1, 2]], []], pa.list_(pa.list_(pa.int16(), 2))),
            "at": pa.array([1_577_934_245_000_000_001, None], pa.timestamp("ns")),
            "when": pa.array([moment, moment]),
            "kind": pa.array(["x", None]).dictionary_encode(),
            "raw": [b"1", b"2"],
            "about": [{"a": 1, "b": None}, {"a": 2, "b": "c"}],
        }
    )
    path = images.parent / "manifest.parquet"
    pq.write_table(table, path)
    source = ManifestSource.list(str(images), SourceOptions(manifest=str(path)))
    wanted = {"kind": pa.string(), "raw": pa.large_binary()}
    assert source.schema.names == ["key", "image", *table.column_names[1:]]
    for number, name in enumerate(table.column_names[1:]):
        kind = source.schema.field(name).type
        assert kind == wanted.get(name, table.schema.field(name).type)
        values = [file.values[number] for file in source.splits["train"]]
        assert pa.array(values, kind) == table.column(name).combine_chunks().cast(kind)


def test_columns_that_samples_have_already_are_kept_under_another_name(images):
    source = listed(images, "file,image,width\na.jpg,first,7\n")
    assert source.schema.names == ["key", "image", "source_image", "source_width"]
    assert facts(source) == {"train": [("a.jpg", None, ("first", 7))]}


def test_keys_are_taken_from_a_column(images):
    source = listed(images, "file,id\na.jpg,007\nsub/b.jpg,003\n", key="id")
    assert facts(source) == {"train": [("003", None, ()), ("007", None, ())]}
    with pytest.raises(ConfigError, match="'7' occurs twice in split 'train'"):
        listed(images, "file,key\na.jpg,7\nsub/b.jpg,7\n")


def test_names_may_begin_with_a_dot_slash_or_look_like_numbers(images):
    (images / "12").write_bytes(jpeg())
    source = listed(images, "file\n./a.jpg\n12\n")
    assert [file.key for file in source.splits["train"]] == ["12", "a.jpg"]


def test_labels_may_be_missing(images):
    source = listed(images, "file,label\na.jpg,dog\nsub/b.jpg,\n")
    assert source.schema.field("label").nullable
    assert [file.label for file in source.splits["train"]] == [0, None]


@pytest.mark.parametrize("column", ["file", "path", "filename", "file_name", "image"])
def test_files_are_named_by_any_of_their_columns(images, column):
    assert facts(listed(images, f"{column}\na.jpg\n")) == {"train": [("a.jpg", None, ())]}


MISTAKES = {
    "no column of files": ("name\na.jpg\n", r"no column of files.*found \['name'\]"),
    "file twice": ("file\na.jpg\nsub/b.jpg\n./a.jpg\n", r"line 4 of .*lists 'a\.jpg' again, after line 2 of"),
    "climbs": ("file\na.jpg\nsub/../../x.jpg\n", r"line 3 of .*'sub/\.\./\.\./x\.jpg'.*below the source"),
    "absolute": ("file\n/etc/passwd\n", r"line 2 of .*'/etc/passwd'"),
    "a URL": ("file\ns3://bucket/a.jpg\n", r"line 2 of .*below the source"),
    "no file": ("file,label\na.jpg,1\n,2\n", r"'file' is empty in line 3 of"),
    "no split": ("file,split\na.jpg,\n", r"'split' is empty in line 2 of"),
    "mixed labels": (
        "file,label\na.jpg,1\nsub/b.jpg,cat\n",
        r"mix integers and names: '1' in line 2 of .*'cat' in line 3",
    ),
    "negative label": ("file,label\na.jpg,0\nsub/b.jpg,-1\n", r"line 3 of .* has the label -1"),
    "large label": (f"file,label\na.jpg,{1 << 40}\n", r"line 2 of .* has the label"),
    "no label": ("file,label\na.jpg,1.5\n", r"'label' of .* holds no labels.*truncated"),
    "broken line": ("file,x\na.jpg,1\nsub/b.jpg\n", r"row 3 \(the header is row 1\): expected 2 columns, found 1"),
    "missing key": ("file,x\na.jpg,1\n", r"no key column 'id'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_manifest_is_named(images, name):
    content, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        listed(images, content, key="id" if name == "missing key" else None)


def test_mixed_labels_are_named_also_in_json(images):
    with pytest.raises(ConfigError, match=r"label.*int64 vs string"):
        listed(images, '{"file": "a.jpg", "label": 1}\n{"file": "b.jpg", "label": "cat"}\n', "manifest.jsonl")


def test_names_of_classes_in_json_may_look_like_numbers(images):
    content = '{"file": "a.jpg", "label": "1"}\n{"file": "sub/b.jpg", "label": "cat"}\n'
    assert listed(images, content, "manifest.jsonl").classes == ("1", "cat")


def test_files_that_are_not_there_are_counted_and_some_named(images):
    content = "file\na.jpg\n" + "".join(f"gone-{number:02}.jpg\n" for number in range(25))
    with pytest.raises(NotFoundError, match=r"25 of 26 files.*gone-00\.jpg.*gone-09\.jpg and 15 more; add them"):
        listed(images, content)


def test_a_link_out_of_the_source_is_refused(images):
    secret = images.parent / "secret.jpg"
    secret.write_bytes(jpeg())
    os.symlink(secret, images / "link.jpg")
    with pytest.raises(ConfigError, match="is a link out of the source"):
        listed(images, "file\nlink.jpg\n")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("manifest.csv", "", NotFoundError, "no samples"),
        ("manifest.csv", "file\n", NotFoundError, "no samples"),
        ("manifest.txt", "a.jpg\n", ConfigError, r"expected \.csv"),
        ("manifest.json", '[{"file": "a.jpg"}]', ConfigError, "holds one array"),
        ("manifest.parquet", "PAR1", ConfigError, "not a readable Parquet"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(images, name, content, error, message):
    with pytest.raises(error, match=message):
        listed(images, content, name)


def test_a_manifest_or_source_that_is_not_there_is_not_found(images, tmp_path):
    with pytest.raises(NotFoundError, match=r"none\.csv"):
        ManifestSource.list(str(images), SourceOptions(manifest=str(tmp_path / "none.csv")))
    with pytest.raises(NotFoundError, match="there is no file or folder"):
        listed(tmp_path / "none", "file\na.jpg\n")


def test_a_manifest_says_what_the_fingerprint_is_of(images):
    first = listed(images, "file,label\na.jpg,1\n").fingerprint()
    assert listed(images, "file,label\na.jpg,1\n").fingerprint() == first
    assert listed(images, "file,label\na.jpg,2\n").fingerprint() != first

"""Data-set versions, splits, samples and logs as a notebook shows them."""

import copy
import io
import pickle
import shutil

import pyarrow as pa
import pytest
from PIL import Image

from datasvc.errors import NotFoundError
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import image_field, shard_schema
from datasvc.shards.versions.dataset import readable_versions
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.diff import diff
from tests.drawing.hostile import HOSTILE, local_name, parsed, text_of, with_class
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

PICTURES = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        image_field("scan"),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("note", pa.string()),
    ]
)


def png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def picture(key, label=0, note="", scan=None):
    return {"key": key, "scan": png(8, 6) if scan is None else scan, "label": label, "note": note}


@pytest.fixture
def pets(repository):
    splits = {
        "train": [[picture("a", 0, "calm"), picture("b", 1)], [picture("c", 1, scan=b"broken")]],
        "val": [[picture("v")]],
    }
    write_version(repository, "pets", splits, PICTURES, ["cat", "dog"])
    return repository


def images_of(root):
    return [each for each in root.iter() if local_name(each) == "img"]


def test_a_sample_is_a_dict_that_shows_its_picture_and_class(pets):
    sample = open_dataset(pets, "pets")["train"][0]
    assert sample == {"key": "a", "scan": png(8, 6), "label": 0, "note": "calm"}
    root = parsed(sample._repr_html_())
    (image,) = images_of(root)
    assert image.get("src").startswith("data:image/png;base64,")
    assert "0 (cat)" in text_of(root)
    assert "calm" in text_of(root)


def test_a_copy_of_a_sample_shows_the_same(pets):
    sample = open_dataset(pets, "pets")["train"][0]
    for same in (copy.copy(sample), pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample)):
        assert same == sample
        assert same._repr_html_() == sample._repr_html_()
    sample["scan"] = 3  # what a transform of the user left there
    assert "does not decode" in text_of(parsed(sample._repr_html_()))


def test_a_split_shows_its_first_samples_and_those_that_do_not_decode(pets):
    root = parsed(open_dataset(pets, "pets")["train"]._repr_html_())
    assert len(images_of(root)) == 2
    (bad,) = with_class(root, "bad")
    assert "c does not decode" in text_of(bad)
    assert [text_of(row).split(": ")[0] for row in with_class(root, "row")] == ["cat", "dog"]


def test_a_split_of_a_remote_repository_shows_no_samples():
    repository = Repository.create("memory://notebook")
    write_version(repository, "pets", {"train": [[picture("a")]]}, PICTURES, ["cat"])
    root = parsed(open_dataset(repository, "pets")["train"]._repr_html_())
    assert images_of(root) == []
    assert "samples 1" in text_of(root)


def test_a_version_shows_its_splits_without_reading_a_table(pets, tmp_path):
    version = open_dataset(pets, "pets")
    shutil.rmtree(tmp_path / "repo" / "objects")
    shown = text_of(parsed(version._repr_html_()))
    assert "pets@1" in shown
    assert "train 3 " in shown


def test_a_log_is_a_graph_and_a_table(pets):
    delete(pets, "pets", keys=["a"], message="<b>bad</b>")
    pets.tag("datasets", "pets@1", "stable")
    log = readable_versions(pets, "pets")
    nodes = with_class(parsed(log._repr_html_()), "node")
    assert ["<b>bad</b>" in text_of(node) for node in nodes] == [True, False]
    assert ["stable" in text_of(node) for node in nodes] == [False, True]
    assert pickle.loads(pickle.dumps(log)) == log
    assert log.to_arrow().select(["version", "samples", "parents"]).to_pylist() == [
        {"version": "pets@1", "samples": 4, "parents": []},
        {"version": "pets@2", "samples": 3, "parents": ["pets@1"]},
    ]
    assert log.to_pandas()["shards"].tolist() == [3, 3]


def test_a_difference_shows_counts_keys_and_drift(pets):
    delete(pets, "pets", keys=["a"])
    shown = text_of(parsed(diff(pets, "pets@1", "pets@2")._repr_html_()))
    assert "train 0 1 0 2" in shown
    assert "changes of train change of deleted a" in shown
    assert "cat 1 0 -1" in shown


def test_columns_of_a_split_are_a_table_without_blobs_and_without_deleted_samples(pets):
    delete(pets, "pets", keys=["a"])
    split = open_dataset(pets, "pets")["train"]
    assert split.to_arrow().to_pylist() == [
        {"key": "b", "label": 1, "note": ""},
        {"key": "c", "label": 1, "note": ""},
    ]
    assert split.to_arrow(["note", "scan"], num_samples=1).to_pylist() == [{"note": "", "scan": png(8, 6)}]
    assert split.to_arrow(num_samples=0).num_rows == 0
    assert split.to_pandas()["label"].tolist() == [1, 1]
    with pytest.raises(NotFoundError, match="no column 'size'; the columns are: key, scan, label, note"):
        split.to_arrow(["size"])


def test_a_split_without_pictures_shows_a_table(repository):
    write_version(
        repository, "texts", {"train": [[{"key": "a", "blob": b"x" * 5000, "label": 7}]]}, LABELLED_SCHEMA, ["cat"]
    )
    split = open_dataset(repository, "texts")["train"]
    assert "key label a 7" in text_of(parsed(split._repr_html_()))
    assert "5.00 kB" in text_of(parsed(split[0]._repr_html_()))


@pytest.mark.parametrize("text", [text for text in HOSTILE if text and text.isprintable()])
def test_hostile_keys_and_class_names_stay_text(repository, text):
    splits = {"train": [[picture(text[:200], 0, text)]]}
    write_version(repository, "pets", splits, PICTURES, [text])
    dataset = open_dataset(repository, "pets")
    write_version(repository, "others", {text[:20]: [[picture("b")]]}, PICTURES, ["cat"])
    for value in (
        diff(repository, "pets", "others"),
        dataset,
        dataset["train"],
        dataset["train"][0],
        readable_versions(repository, "pets"),
    ):
        parsed(value._repr_html_())

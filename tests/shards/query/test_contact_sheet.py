"""What people look at: the first samples, small pictures, and a page of them that runs nothing."""

import base64
import io
import os
import re
import stat
from html.parser import HTMLParser

import pyarrow as pa
import pytest
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import image_field, image_schema, shard_schema
from datasvc.shards.images.thumbnail import thumbnail
from datasvc.shards.query.contact_sheet import preview_samples, write_contact_sheet
from datasvc.shards.versions.delete import delete
from tests.samples import jpeg
from tests.shards.written_versions import write_version


def image_sample(key, label=0, image=None, width=40, height=30):
    return {"key": key, "image": image or jpeg(width, height), "width": width, "height": height, "label": label}


@pytest.fixture
def train(repository):
    samples = [image_sample("a.jpg"), image_sample("b.jpg", 1, width=400, height=100), image_sample("c.jpg", -1)]
    write_version(
        repository, "pets", {"train": [samples[:2], samples[2:]]}, image_schema(labelled=True), ("cat", "dog")
    )
    return open_dataset(repository, "pets")["train"]


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_a_preview_has_values_sizes_and_the_name_of_the_class(train):
    first, second, third = preview_samples(train, 10)
    assert (first.split, first.key, first.class_name, first.images["image"]) == ("train", "a.jpg", "cat", jpeg())
    assert second.values == {"label": 1, "width": 400, "height": 100}
    assert second.blob_bytes == {"image": len(jpeg(400, 100))}
    assert third.class_name is None


def test_a_limited_number_of_live_samples_is_shown(train, repository):
    assert [sample.key for sample in preview_samples(train, 2)] == ["a.jpg", "b.jpg"]
    assert list(preview_samples(train, 0)) == []
    delete(repository, "pets", keys=["a.jpg"])
    left = open_dataset(repository, "pets")["train"]
    assert [sample.key for sample in preview_samples(left, 2)] == ["b.jpg", "c.jpg"]
    with pytest.raises(ConfigError):
        preview_samples(train, -1)


def test_columns_that_are_declared_images_are_and_other_blobs_are_sizes(repository):
    schema = shard_schema(
        [
            pa.field("key", pa.string(), nullable=False),
            image_field("mask", nullable=True),
            pa.field("audio", pa.large_binary()),
        ]
    )
    samples = [{"key": "a", "mask": jpeg(), "audio": b"123"}, {"key": "b", "mask": None, "audio": None}]
    write_version(repository, "pets", {"train": [samples]}, schema)
    first, second = preview_samples(open_dataset(repository, "pets")["train"], 2)
    assert first.images == {"mask": jpeg()}
    assert first.blob_bytes == {"mask": len(jpeg()), "audio": 3}
    assert (second.images, second.blob_bytes, second.values) == ({}, {}, {"mask": None, "audio": None})


@pytest.mark.parametrize(("size", "expected"), [((400, 100), (64, 16)), ((100, 400), (16, 64)), ((40, 30), (40, 30))])
def test_a_thumbnail_keeps_the_shape_and_never_grows(size, expected):
    assert thumbnail(jpeg(*size), 64).size == expected


def test_a_thumbnail_stands_upright_and_is_rgb_whatever_it_was():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert thumbnail(jpeg(40, 30, exif=exif), 100).size == (30, 40)
    for mode in ("L", "LA", "RGBA", "P", "CMYK", "1", "I;16"):
        buffer = io.BytesIO()
        Image.new(mode, (5, 4)).save(buffer, "TIFF" if mode == "CMYK" else "PNG")
        assert thumbnail(buffer.getvalue(), 100).mode == "RGB"


@pytest.mark.parametrize("content", [b"", b"no image", jpeg()[:100], b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_what_does_not_decode_is_a_bad_sample(content):
    with pytest.raises(BadSampleError, match=r"does not decode|not an image|empty file"):
        thumbnail(content, 64)


def test_a_contact_sheet_shows_every_sample_and_needs_nothing_beside_itself(train, tmp_path):
    path = tmp_path / "sheet.html"
    assert write_contact_sheet(path, "pets@1", preview_samples(train, 10)) == 3
    page = Page(path)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["a.jpg", "b.jpg", "c.jpg"]
    for image, size in zip(images, [(40, 30), (192, 48), (40, 30)], strict=True):
        kind, data = image["src"].split(",")
        assert kind == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
            assert shown.size == size == (int(image["width"]), int(image["height"]))
    assert "pets@1" in page.text
    assert "cat" in page.text
    assert f"{len(jpeg())} bytes" in page.text
    assert not re.search(r"(src|href)=[\"'](?!data:)", path.read_text())


def test_nothing_in_a_sample_can_leave_its_caption(repository, tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'
    schema = image_schema(labelled=True)
    write_version(repository, "pets", {"train": [[image_sample(evil)]]}, schema, (f"class {evil}",))
    path = tmp_path / "sheet.html"
    write_contact_sheet(path, evil, preview_samples(open_dataset(repository, "pets")["train"], 1))
    page = Page(path)
    assert not [tag for tag, _ in page.tags if tag == "script"]
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert set(image) == {"src", "width", "height", "alt"}
    assert image["alt"] == evil
    assert page.text.count(evil) == 4  # title, heading, class, key
    (policy,) = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert "default-src 'none'" in policy


def test_an_image_that_does_not_decode_is_shown_as_its_error_beside_the_others(repository, tmp_path):
    samples = [image_sample("bad", image=jpeg()[:200]), image_sample("good")]
    write_version(repository, "pets", {"train": [samples]}, image_schema(labelled=True), ("cat",))
    path = tmp_path / "sheet.html"
    write_contact_sheet(path, "pets", preview_samples(open_dataset(repository, "pets")["train"], 2))
    page = Page(path)
    assert "does not decode" in page.text
    assert [attributes["alt"] for tag, attributes in page.tags if tag == "img"] == ["good"]


def test_long_texts_are_shortened(repository, tmp_path):
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "x" * 10_000}]]})
    path = tmp_path / "sheet.html"
    write_contact_sheet(path, "pets", preview_samples(open_dataset(repository, "pets")["train"], 1))
    assert "x" * 200 + "..." in path.read_text()
    assert "x" * 201 not in path.read_text()


def test_an_old_sheet_is_replaced_whole_or_not_at_all(train, tmp_path):
    path = tmp_path / "sheet.html"
    path.write_text("old")

    def failing():
        yield next(preview_samples(train, 1))
        raise BadSampleError("half-way")

    with pytest.raises(BadSampleError):
        write_contact_sheet(path, "pets", failing())
    assert path.read_text() == "old"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]
    write_contact_sheet(path, "pets", preview_samples(train, 1))
    assert path.read_text().startswith("<!DOCTYPE html>")


def test_a_sheet_that_cannot_be_written_is_a_clear_error(train, tmp_path):
    with pytest.raises(NotFoundError, match=r"the folder .* does not exist"):
        write_contact_sheet(tmp_path / "missing" / "sheet.html", "pets", preview_samples(train, 1))
    if os.geteuid():
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(ConfigError, match="not allowed"):
            write_contact_sheet(tmp_path / "sheet.html", "pets", preview_samples(train, 1))

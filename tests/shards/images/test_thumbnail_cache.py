"""Thumbnails are small JPEGs that were encoded here, from a bounded cache; a bad one is a picture that says so."""

import io
import os
import threading

import pytest
from PIL import Image

from datasvc.shards.images.thumbnail_cache import ThumbnailCache, make_thumbnail
from datasvc.testing import encode_jpeg


def opened(content):
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def encoded(kind, mode, size):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (encode_jpeg(1000, 500), (256, 128)),
        (encode_jpeg(40, 30), (40, 30)),
        (encoded("PNG", "RGBA", (300, 600)), (128, 256)),
        (encoded("PNG", "I;16", (64, 64)), (64, 64)),
        (encoded("GIF", "P", (20, 10)), (20, 10)),
    ],
)
def test_a_thumbnail_is_a_jpeg_of_at_most_256_pixels(content, size):
    image = opened(make_thumbnail(content))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", size)


def test_nothing_of_the_file_but_its_pixels_is_kept():
    hostile = encode_jpeg(40, 30)[:-2] + b"<script>alert(1)</script>\xff\xd9"
    assert b"<script>" not in make_thumbnail(hostile)


@pytest.mark.parametrize("content", [None, b"", b"<svg onload='alert(1)'/>", encode_jpeg(400, 300)[:300]])
def test_what_cannot_be_shown_is_a_picture_that_says_why(content):
    image = opened(make_thumbnail(content))
    assert image.size == (256, 256)
    assert len(image.getcolors(1 << 16)) > 3


def test_an_image_that_would_fill_the_memory_is_not_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    bomb = encoded("PNG", "1", (8192, 8192))
    assert len(bomb) < 20_000
    assert opened(make_thumbnail(bomb)).size == (256, 256)


def test_a_thumbnail_is_made_once_and_again_when_its_file_is_damaged(tmp_path):
    reads = []

    def read():
        reads.append(1)
        return encode_jpeg(40, 30)

    first = ThumbnailCache(tmp_path).get("a", read)
    assert ThumbnailCache(tmp_path).get("a", read) == first
    assert len(reads) == 1
    (path,) = tmp_path.glob("*/*.jpg")
    path.write_bytes(first[:100])
    assert ThumbnailCache(tmp_path).get("a", read) == first
    assert path.read_bytes() == first
    assert len(reads) == 2


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path):
    images = [encode_jpeg(60, 60, seed=seed) for seed in range(20)]
    size_bytes = len(make_thumbnail(images[0]))
    cache = ThumbnailCache(tmp_path, max_bytes=8 * size_bytes)
    for number, image in enumerate(images):
        cache.get(str(number), lambda image=image: image)
        # A moment later, without waiting for it: the clock of the files is moved back.
        for path in tmp_path.glob("*/*.jpg"):
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
        cache.get("0", lambda: pytest.fail("the one that is used all the time was removed"))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.jpg")) <= 12 * size_bytes


def test_without_a_folder_to_write_thumbnails_are_made_all_the_same(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert opened(ThumbnailCache(tmp_path / "file").get("a", lambda: encode_jpeg(40, 30))).size == (40, 30)


def test_several_threads_use_one_folder(tmp_path):
    image, results = encode_jpeg(500, 400), []
    caches = [ThumbnailCache(tmp_path, max_bytes=1) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda cache=cache: results.append(cache.get("a", lambda: image))) for cache in caches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1

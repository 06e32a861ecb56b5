"""File names from keys: inside the destination, legible, and one for each key."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.shards.export.destination import image_extension, safe_part, safe_path, split_extension
from tests.samples import jpeg

TEXT = st.text(alphabet=st.characters(codec="utf-8"))
NASTY = st.text(alphabet='a./\\%2EF~:*?"<>|\0\n é')


@given(TEXT | NASTY)
def test_a_path_never_climbs_hides_or_grows_beyond_what_file_systems_take(key):
    path = safe_path(key)
    assert len(path.encode()) <= 1000
    for part in path.split("/"):
        assert part
        assert not part.startswith(".")
        assert not part.endswith((".", " "))
        assert len(part.encode()) <= 214
        assert not re.search(r'[\x00-\x1f\x7f\\:*?"<>|]', part)


@given(st.lists(TEXT | NASTY, unique=True, min_size=2))
def test_two_keys_never_give_one_name(keys):
    assert len({safe_path(key) for key in keys}) == len(keys)
    assert len({safe_part(key) for key in keys}) == len(keys)


@pytest.mark.parametrize("size", range(40, 56))
def test_a_cut_never_halves_an_escape(size):
    cut = safe_part("x" * size + "%" * 100)
    assert re.sub("%[0-9A-F]{2}", "", cut).count("%") == 1


@given(st.text(alphabet="x/%.~é", min_size=190))
@example("x" * 201)
@example("é" * 101)
@example("a/" * 501)
@example("%" * 67)
def test_long_keys_are_cut_and_stay_apart(key):
    names = {safe_path(key), safe_path(f"{key}y"), safe_path(f"y{key}")}
    assert len(names) == 3
    assert all(len(part.encode()) <= 214 for name in names for part in name.split("/"))


@pytest.mark.parametrize("key", ["cat/1", "n01440764/n01440764_10026", "a b/ключ_-+=@!,;'()[]{}#&$", "a.b"])
def test_what_is_harmless_stays_as_it_is(key):
    assert safe_path(key) == key


@pytest.mark.parametrize(
    ("key", "extension", "expected"),
    [
        ("a/1.JPEG", "jpg", ("a/1", "JPEG")),
        ("a/1.png", "jpg", ("a/1.png", "")),
        ("a/1", "jpg", ("a/1", "")),
        ("a.jpg/1", "jpg", ("a.jpg/1", "")),
        ("a/.jpg", "jpg", ("a/.jpg", "")),
        ("1.tiff", "tif", ("1", "tiff")),
        ("1.jpg", None, ("1.jpg", "")),
    ],
)
def test_only_the_images_own_extension_counts(key, extension, expected):
    assert split_extension(key, extension) == expected


@pytest.mark.parametrize(
    ("blob", "extension"),
    [
        (jpeg(), "jpg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"RIFF\0\0\0\0WEBPVP8 ", "webp"),
        (b"RIFF\0\0\0\0WAVE", None), (b"MM\0*", "tif"), (b"GIF89a", "gif"), (b"BM\0\0", "bmp"), (b"", None),
        (b"text", None),
    ],
)  # fmt: skip
def test_the_extension_follows_the_content(blob, extension):
    assert image_extension(blob) == extension
    assert image_extension(memoryview(blob)) == extension

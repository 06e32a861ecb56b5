"""Pictures as other programs write them: intact, but in modes and with metadata that a library refuses or clips."""

import base64
import io
import json
import sys

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.loaders.torch.dataset import decode_image
from datasvc.shards import ingest, open_dataset
from datasvc.shards.images.header import EXTENSIONS, Reencoding, read_header, reencode
from datasvc.shards.images.thumbnail import thumbnail
from datasvc.shards.ingestion.dry_run import dry_run_ingest
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.images import image_folder
from tests.cli.command import run
from tests.support.odd_images import chunk, encode, picture, png_16, sixteen_bits

GREY_16 = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64)


def png_with(**texts):
    info = PngImagePlugin.PngInfo()
    for key, text in texts.items():
        {"t": info.add_text, "i": info.add_itxt}[key[0]](key, text, zip=key[1] == "z")
    return encode(picture(), "PNG", pnginfo=info)


def broken_checksum(name):
    content = encode(picture(), "PNG")
    extra = bytearray(chunk(name, b"Comment\0abc"))
    extra[-1] ^= 1
    return content[:33] + bytes(extra) + content[33:]


@pytest.mark.parametrize(
    "content",
    [
        png_with(tz="a" * 3_000_000),
        png_with(iz="a" * 3_000_000),
        png_with(tu="a" * 3_000_000),
        png_with(**{f"tz{number}": "a" * 900_000 for number in range(80)}),
        encode(picture(), "PNG", icc_profile=bytes(2_000_000)),
        broken_checksum(b"tEXt"),
        broken_checksum(b"gAMA"),
        encode(picture(), "PNG")[:-12] + broken_checksum(b"tEXt")[33:60] + encode(picture(), "PNG")[-12:],
    ],
    ids=["ztxt", "itxt", "text", "many", "profile", "checksum", "gamma", "at the end"],
)
def test_a_png_with_odd_metadata_is_a_picture(content):
    """python-pillow/Pillow#8363, python-pillow/Pillow#5610, hiyouga/LlamaFactory#6300: the pixels are intact."""
    assert read_header(content, decode=True) == ("PNG", 60, 44)
    assert np.array_equal(decode_image(content, "numpy"), np.asarray(picture()))


def test_damage_of_the_pixels_of_a_png_is_still_found():
    """python-pillow/Pillow#8363: the other way round."""
    content = bytearray(encode(picture(), "PNG"))
    content[content.find(b"IDAT") + 30] ^= 1
    with pytest.raises(Exception, match=r"does not decode|not an image"):
        read_header(bytes(content), decode=True)


def scaled(content, side=30):
    made = reencode(content, Reencoding(max_side=side))
    assert made is not None
    return Image.open(io.BytesIO(made))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "YCbCr"])
def test_pictures_of_every_mode_are_scaled(mode):
    """VoxelCubes/PanelCleaner#194, un1t/django-resized#40: PNG has no CMYK, LAB or YCbCr."""
    if mode == "LAB":
        lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
        image = ImageCms.applyTransform(picture(), lab)
    else:
        image = picture().convert(mode)
    content = encode(image, "TIFF")
    small = scaled(content)
    assert (small.format, small.size) == ("PNG", (30, 22))
    expected = (
        picture().convert("L" if mode in {"1", "L", "LA"} else "RGB").resize((30, 22), Image.Resampling.LANCZOS)
    )
    difference = np.asarray(small.convert(expected.mode), np.int16) - np.asarray(expected, np.int16)
    assert np.abs(difference).mean() < (40 if mode == "1" else 12 if mode == "P" else 4)
    assert read_header(encode(small, "PNG"), decode=True).kind == "PNG"


def test_a_profile_of_inks_is_not_kept_with_colours_of_light():
    """VoxelCubes/PanelCleaner#194: a CMYK profile in an RGB file gives wrong colours in each viewer."""
    assert "icc_profile" not in scaled(encode(picture().convert("CMYK"), "TIFF", icc_profile=b"cmyk")).info


def test_a_palette_is_scaled_in_true_colour():
    """python-pillow/Pillow#1097, thumbor/thumbor#376: a palette cannot be averaged."""
    stripes = np.zeros((40, 40), np.uint8)
    stripes[:, ::2] = 1
    image = Image.fromarray(stripes, "P")
    image.putpalette([0, 0, 0, 250, 250, 250])
    grey = np.asarray(scaled(encode(image, "PNG"), 10).convert("L"))
    assert 100 < grey.min() <= grey.max() < 150


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_values_of_16_bits_stay_16_bits_when_they_are_scaled(kind):
    """python-pillow/Pillow#3011, python-pillow/Pillow#1099: X-rays were refused or clipped."""
    content = encode(Image.fromarray(GREY_16), kind)
    small = scaled(content, 16)
    assert (small.mode, small.size) == ("I;16", (16, 12))
    values = np.asarray(small).astype(int)
    assert np.abs(values - GREY_16.reshape(12, 4, 16, 4).mean((1, 3))).max() < 700
    assert np.unique(values).size > 180


def test_floats_stay_floats_when_they_are_scaled():
    """python-pillow/Pillow#3011: the same for depth in metres."""
    small = scaled(encode(Image.fromarray(GREY_16.astype(np.float32) / 7), "TIFF"), 16)
    assert (small.format, small.mode, small.size) == ("TIFF", "F", (16, 12))


@pytest.mark.parametrize(
    "content",
    [
        encode(Image.fromarray(GREY_16), "PNG"),
        encode(Image.fromarray(GREY_16), "TIFF"),
        png_16(sixteen_bits(picture())),
    ],
    ids=["png", "tiff", "colour"],
)
def test_a_page_shows_16_bits_in_their_range(content):
    """python-pillow/Pillow#2574, python-pillow/Pillow#1108: all values above 255 were white."""
    shown = np.asarray(thumbnail(content, 64).convert("L"))
    assert shown.mean() < 200
    assert np.unique(shown).size > 100


def two(kind, **options):
    """Return a file of two pictures."""
    return encode(picture(), kind, save_all=True, append_images=[picture(seed=1)], **options)


@pytest.mark.parametrize("max_side", [None, 16])
def test_phones_photos_and_names_that_lie_are_ingested(repository, tmp_path, max_side):
    """photoprism/photoprism#189: what phones and other programs write, also names that lie."""
    files = {
        "png.jpg": encode(picture(), "PNG"),
        "mpo.jpg": two("MPO"),
        "pages.tif": two("TIFF"),
        "moves.png": two("PNG"),
        "moves.webp": two("WEBP", lossless=True),
        "grey.jpg": encode(picture().convert("L"), "JPEG"),
        "inks.jpg": encode(picture().convert("CMYK"), "JPEG"),
        "slow.jpg": encode(picture(), "JPEG", progressive=True),
        "jpg.png": encode(picture(), "JPEG"),
        "new.avif": encode(picture(), "AVIF"),
    }
    (tmp_path / "a").mkdir()
    for name, content in files.items():
        (tmp_path / "a" / name).write_bytes(content)
    ingest(repository, str(tmp_path / "a"), "photos", max_side=max_side, decode_check=True)
    samples = {sample["key"]: sample for sample in open_dataset(repository, "photos")["train"]}
    assert samples.keys() == files.keys()
    expected = np.asarray(picture().resize((16, 12)) if max_side else picture()).astype(int)
    for name, sample in samples.items():
        pixels = decode_image(sample["image"], "numpy").astype(int)
        assert pixels.shape == expected.shape, name
        if not name.startswith("grey"):
            assert np.abs(pixels - expected).mean() < 20, name


def test_pictures_that_are_not_read_are_named_before_during_and_after(tmp_path):
    """caezium/burrow#283, photoprism/photoprism#189: most photos of a folder were left out."""
    (tmp_path / "a" / "x").mkdir(parents=True)
    for name in ("1.NEF", "2.nef", "3.gif", "4.png"):
        (tmp_path / "a" / "x" / name).write_bytes(encode(picture(), "GIF" if "gif" in name else "PNG"))
    said = (
        "ignored files: 2 .nef, 1 .gif; pictures in .gif and .nef are not read: for the first frame of each GIF, "
        "--first-frame (first_frame=True); or convert them to PNG or JPEG"
    )
    repo = ("--repo", str(tmp_path / "repo"))
    assert said in run("ingest", str(tmp_path / "a"), "a", *repo, "--dry-run").stdout
    planned = run("ingest", str(tmp_path / "a"), "a", *repo, "--dry-run", "--json").stdout
    assert json.loads(planned)["ignored"] == {".nef": 2, ".gif": 1}
    assert said in run("ingest", str(tmp_path / "a"), "a", *repo).stderr
    assert said in run("show", "a", *repo).stdout


# 16 x 24 pixels after the rotation by its EXIF tag and its box `irot`: the upper half is red, the lower one blue.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAcdtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAADRpbG9j"
    "AAAAAERAAAIAAQAAAAAB6wABAAAAAAAAAEgAAgAAAAACMwABAAAAAAAAACQAAAA4aWluZgAAAAAAAgAAABVpbmZlAgAAAAABAABodmMxAAAA"
    "ABVpbmZlAgAAAQACAABFeGlmAAAAAA5waXRtAAAAAAABAAABBmlwcnAAAADlaXBjbwAAAHVodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNg"
    "AAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQApQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbqrprm4CGgwIAAAAyAAAADAIRiAAEABkQB"
    "wXPBiQAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABAAAAAQAAAAChjbGFwAAAAGAAAAAEAAAAQAAAAAf///9gAAAAC////0AAA"
    "AAIAAAAQcGl4aQAAAAADCAgIAAAACWlyb3QDAAAAGWlwbWEAAAAAAAAAAQABBoECAwWEhgAAABppcmVmAAAAAAAAAA5jZHNjAAIAAQABAAAA"
    "dG1kYXQAAABEKAGvEyGlIGjlNVP9KpdSAWB+pMAs8abNDLZBeYU2ExDCXSI0DZuzX+RTYKz+gDcX0jL++smygOfHKju7JMC0b92c6EwAAAAG"
    "RXhpZgAATU0AKgAAAAgAAQESAAMAAAABAAYAAAAAAAA="
)


@pytest.mark.parametrize("max_side", [None, 12])
def test_a_photo_of_a_phone_is_stored_upright_as_jpeg(repository, tmp_path, max_side):
    """caezium/burrow#283, thtrieu/darkflow#774: neither loaders nor browsers decode HEIC."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "IMG_1.HEIC").write_bytes(HEIC)
    assert not dry_run_ingest(None, str(tmp_path / "a"), "photos").bad
    ingest(repository, str(tmp_path / "a"), "photos", max_side=max_side, decode_check=True)
    (sample,) = open_dataset(repository, "photos")["train"]
    height, width = (12, 8) if max_side else (24, 16)
    assert (sample["key"], sample["height"], sample["width"]) == ("IMG_1.HEIC", height, width)
    pixels = decode_image(sample["image"], "numpy").astype(int)
    assert pixels.shape == (height, width, 3)
    assert np.abs(pixels[:2] - [200, 40, 40]).max() < 60
    assert np.abs(pixels[-2:] - [40, 40, 200]).max() < 60
    assert read_header(sample["image"]).kind == "JPEG"


def test_without_the_package_heic_is_refused_with_its_name(repository, tmp_path, monkeypatch):
    """caezium/burrow#283: in a folder and as values of other sources."""
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    with pytest.raises(BadSampleError, match=r"is HEIC, which needs pi-heif: pip install .pi-heif"):
        ingest(repository, [{"key": "a", "image": HEIC}], "photos")
    monkeypatch.setattr(image_folder, "EXTENSIONS", EXTENSIONS - {".heic", ".heif"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "IMG_1.HEIC").write_bytes(HEIC)
    with pytest.raises(NotFoundError, match=r"pictures in \.heic are not read: for HEIC, pip install .pi-heif"):
        ingest(repository, str(tmp_path / "a"), "photos")


@pytest.mark.parametrize("cut", [60, 300, len(HEIC) - 80])
def test_a_damaged_heic_file_is_a_bad_sample(repository, cut):
    """caezium/burrow#283: an incomplete copy from a phone."""
    with pytest.raises(BadSampleError, match=r"does not decode|not an image"):
        ingest(repository, [{"key": "a", "image": HEIC[:cut]}], "photos")


def test_the_first_frame_of_a_gif_is_a_sample_on_request(repository, tmp_path):
    """KichangKim/DeepDanbooru#22, alex000kim/nsfw_data_scraper#35: animations among the pictures of a class."""
    (tmp_path / "a" / "x").mkdir(parents=True)
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a" / "x" / "1.gif", save_all=True, append_images=frames[1:])
    with pytest.raises((NotFoundError, ConfigError)):
        ingest(repository, str(tmp_path / "a"), "gifs")
    ingest(repository, str(tmp_path / "a"), "gifs", source_options=SourceOptions(first_frame=True))
    (sample,) = open_dataset(repository, "gifs")["train"]
    pixels = decode_image(sample["image"], "numpy")
    assert pixels.shape == (6, 8, 3)
    assert (pixels == [255, 0, 0]).all()
    with pytest.raises(ConfigError, match="--first-frame"):
        ingest(repository, [{"key": "a"}], "b", source_options=SourceOptions(first_frame=True))

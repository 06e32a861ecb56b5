"""Encoded images: read headers without decoding, check that files are complete, and re-encode to smaller images.

An ingest checks each image with this module. The header of a plain JPEG (`is_plain_jpeg`) is parsed here, about
twenty times faster than by Pillow, which reads all other files. Pillow accepts some files with a missing end, but GPU
decoders do not. So the end of a file is checked. If it does not show that the file is complete, the image is decoded.
HEIC pictures become JPEG or PNG, because no loader decodes them.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, features

from datasvc.errors import BadSampleError, ConfigError, DatasvcError
from datasvc.extras import how_to_install
from datasvc.shards.images.exif import parse_orientation, read_orientation, readable_png, swaps_sides
from datasvc.shards.images.jpeg_damage import check_scans, decode_jpeg
from datasvc.shards.images.jpeg_segments import (
    FRAME,
    PLAIN_FRAMES,
    PROGRESSIVE,
    SEGMENT,
    START_OF_SCAN,
    jpeg_segments,
)

# Without pi-heif, files of phones are left out and counted, as other files that are no readable pictures.
_HEIF_EXTENSIONS: Final = (".heic", ".heif") if importlib.util.find_spec("pi_heif") else ()
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", *_HEIF_EXTENSIONS})
REENCODE_QUALITY: Final = 90  # default of `Reencoding.quality`

_END_OF_IMAGE: Final = b"\xff\xd9"
_EXIF_SEGMENT, _MPO_SEGMENT, _ADOBE_SEGMENT = 0xE1, 0xE2, 0xEE
_MAX_SEGMENTS = 64  # a JPEG with more segments before its pixels is left to Pillow
# Markers of segments that affect neither size nor colours: tables, application data, comments.
_IGNORED_MARKERS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}) - {
    _EXIF_SEGMENT,
    _MPO_SEGMENT,
    _ADOBE_SEGMENT,
}
# Formats that Pillow may try. Others are unsafe for untrusted bytes: the EPS reader, for example, starts a program.
# Pillow has AVIF since 11.3; older ones warn about a feature that they do not have.
_AVIF: Final = ("AVIF",) if "avif" in features.modules and features.check("avif") else ()
FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000", *_AVIF)
# The brands of HEIF files that are compressed with HEVC; AVIF has the same container with other brands.
_HEIF_BRANDS: Final = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_MAX_BRANDS_BYTES: Final = 256
# What phones and web pages hand out as .jpg: by the first four bytes of a file, or by the brand of a file of boxes.
_UNREAD: Final = {
    b"%PDF": "a PDF document",
    **dict.fromkeys((b"qt  ", b"mp41", b"mp42", b"isom", b"M4V "), "a video"),
}
_WAY_OUT: Final = "convert it to PNG or JPEG, or leave it out"
_ENCODERS: Final = {"JPEG", "PNG", "WEBP"}  # formats that `reencode` keeps


class ImageHeader(NamedTuple):
    """Pillow's name of the format, such as "JPEG", and the size in pixels after the EXIF rotation."""

    kind: str
    width: int
    height: int


@dataclass(frozen=True)
class Reencoding:
    """Settings for making images smaller.

    Attributes:
        max_side: larger images are scaled down to this many pixels on their longer side; None: no scaling.
        quality: JPEG and WebP quality, 1 to 100. Without `max_side`, all JPEG and WebP images are re-encoded with it.

    Raises:
        ConfigError: a value is out of range.
    """

    max_side: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.max_side is not None and self.max_side < 1:
            raise ConfigError(f"max_side is {self.max_side}; expected at least 1 pixel")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ConfigError(f"quality is {self.quality}; expected 1 to 100")

    @property
    def is_enabled(self) -> bool:
        """Whether any image is re-encoded."""
        return self.max_side is not None or self.quality is not None


def read_header(content: bytes | memoryview, *, decode: bool = False) -> ImageHeader:
    """Check an encoded image and return its header.

    Args:
        content: the complete file.
        decode: also decode every pixel, which takes about a hundred times longer. In a JPEG, this finds damage that
            decoders repair, see `jpeg_damage`.

    Raises:
        BadSampleError: the file is empty, not an image, truncated, or has too many pixels; the message says which.
    """
    if not len(content):
        raise BadSampleError("empty file")
    plain = None if decode else _parse_plain_jpeg(memoryview(content))
    return plain or _read_with_pillow(content, decode=decode)


def is_plain_jpeg(content: bytes | memoryview) -> bool:
    """Return whether the file is a complete JPEG of one picture with 8 bits per component, in grey or YCbCr.

    The frame of the picture is baseline (0xC0), extended sequential (0xC1) or progressive (0xC2). Three components
    count as YCbCr unless an Adobe segment marks them as RGB.
    """
    return _parse_plain_jpeg(memoryview(content)) is not None


def reencode(content: bytes | memoryview, settings: Reencoding) -> bytes | None:
    """Return the image scaled down, upright and encoded again according to `settings`; None if it stays unchanged.

    Raises:
        BadSampleError: the image does not decode.
    """
    with open_image(content) as image:
        kind = image.format or ""
        is_too_long = settings.max_side is not None and max(image.size) > settings.max_side
        is_recompressed = settings.max_side is None and kind in {"JPEG", "WEBP"}  # only `quality` is given
        if not is_too_long and not is_recompressed:
            return None
        upright = _in_continuous_tones(ImageOps.exif_transpose(image), kind)
        if is_too_long and settings.max_side is not None:  # the second condition only narrows the type
            upright = _scale_down(upright, settings.max_side)
        return _encode(upright, kind, settings.quality or REENCODE_QUALITY)


def check_and_reencode(
    content: bytes | memoryview, settings: Reencoding, *, decode: bool
) -> tuple[ImageHeader, bytes | None]:
    """Check an image, and encode it again if `settings` require it, or if it is HEIC.

    With `decode`, the file itself is decoded: a new encoding would hide its damage.

    Returns:
        The header of the image to store, and its new bytes; None in place of the bytes if `content` is stored.

    Raises:
        BadSampleError: see `read_header`.
    """
    if _is_heif(content):
        converted = _convert_heif(content, settings)  # decodes every pixel
        return read_header(converted), converted
    header = read_header(content, decode=True) if decode else None
    encoded = reencode(content, settings) if settings.is_enabled else None
    if header is None or encoded:  # not checked yet, or the new image has another size
        header = read_header(encoded or content)
    return header, encoded


def _is_heif(content: bytes | memoryview) -> bool:
    """Return whether a file is HEIC: its first box has the type `ftyp` and lists brands (ISO/IEC 23008-12)."""
    if bytes(content[4:8]) != b"ftyp":
        return False
    brands = bytes(content[8 : min(int.from_bytes(content[:4], "big"), _MAX_BRANDS_BYTES)])
    return any(brands[start : start + 4] in _HEIF_BRANDS for start in range(0, len(brands), 4))


def _convert_heif(content: bytes | memoryview, settings: Reencoding) -> bytes:
    """Return the main picture of a HEIC file, upright and in 8 bits, as JPEG, or PNG if it has an alpha channel."""
    try:
        import pi_heif
    except ModuleNotFoundError:
        raise BadSampleError(f"is HEIC, which needs pi-heif: {how_to_install('heic')}") from None
    # Only here: stored images are never HEIC, so that pages and loaders open none from a foreign repository.
    pi_heif.register_heif_opener(thumbnails=False)
    with open_image(content, formats=("HEIF",)) as image:
        upright = ImageOps.exif_transpose(image)
        if settings.max_side is not None and max(upright.size) > settings.max_side:
            upright = _scale_down(upright, settings.max_side)
        kind = "PNG" if upright.mode.endswith(("A", "a")) else "JPEG"
        return _encode(upright, kind, settings.quality or REENCODE_QUALITY)


@contextmanager
def open_image(content: bytes | memoryview, *, formats: tuple[str, ...] = FORMATS) -> Iterator[Image.Image]:
    """Open an encoded image with Pillow, and map Pillow's errors, here and in the `with` block, to BadSampleError.

    Raises:
        BadSampleError: the file is not an image, has too many pixels, or does not decode; the message says which.
    """
    if not len(content):
        raise BadSampleError("empty file")
    try:
        with Image.open(io.BytesIO(readable_png(content)), formats=formats) as image:
            if image.format in {"JPEG", "MPO"}:
                check_scans(content, _scan_offset(memoryview(content)), image.width * image.height)
            yield image
    except DatasvcError:
        raise  # from the `with` block, with a message of its own
    except UnidentifiedImageError as error:
        if kind := _UNREAD.get(bytes(content[8:12]) if content[4:8] == b"ftyp" else bytes(content[:4])):
            raise BadSampleError(f"{kind}, which is not read, whatever its name ends with: {_WAY_OUT}") from error
        raise BadSampleError(f"not an image: the file starts with {bytes(content[:16])!r}") from error
    except Image.DecompressionBombError as error:
        raise BadSampleError(str(error)) from error
    except Exception as error:  # Pillow raises many types for damaged files
        raise BadSampleError(f"does not decode: {error}") from error


def _in_continuous_tones(image: Image.Image, kind: str) -> Image.Image:
    """Return an image in a mode whose values can be averaged, and that the encoder of its format has."""
    # A palette or two levels cannot be averaged: Pillow would repeat single pixels.
    if image.mode == "1":
        return image.convert("L")
    if image.mode in {"P", "PA"}:
        return image.convert("RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB")
    if image.mode in {"CMYK", "LAB", "YCbCr", "HSV"} and not (kind in {"JPEG", "MPO"} and image.mode == "CMYK"):
        converted = _lab_to_rgb(image) if image.mode == "LAB" else image.convert("RGB")
        converted.info.pop("icc_profile", None)  # it describes the colours of the old mode
        return converted
    return image


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, rgb, "LAB", "RGB"))
    assert converted is not None  # None is returned only for a change in place
    return converted


def _scale_down(image: Image.Image, max_side: int) -> Image.Image:
    """Return an image with neither side longer than `max_side` pixels; 16-bit values stay 16-bit values."""
    is_16_bit = image.mode.startswith("I;16")
    if is_16_bit:
        # Pillow cannot average this mode; floats of 32 bits hold its values exactly.
        image = Image.fromarray(np.asarray(image).astype(np.float32))
    image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=None if is_16_bit else 2.0)
    return Image.fromarray(np.rint(np.asarray(image)).clip(0, 65535).astype(np.uint16)) if is_16_bit else image


def to_rgb(image: Image.Image, kind: str) -> Image.Image:
    """Return an image of any mode as 8-bit RGB; the same object if it is RGB already.

    Grey values are repeated, palettes are resolved, and an alpha channel is dropped. 16-bit values are scaled and
    rounded to 8 bits, not clipped. Floats 0..1 become 0..255. LAB becomes sRGB, other modes are converted without a
    profile.

    `kind` is Pillow's name of the file format. Raises BadSampleError: the pixels are 32-bit integers.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and kind != "TIFF"):
        # 16-bit values; only in TIFF, the mode I has 32 bits. Pillow's own conversion clips them at 255. Round to the
        # nearest level: no value is exactly between two levels, because 65535 is odd.
        levels = (np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        levels = np.rint(np.clip(np.nan_to_num(np.asarray(image)), 0, 1) * 255)
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode == "I":
        raise BadSampleError("has 32-bit integer pixels, whose range is undefined; store it with 8 or 16 bits")
    if image.mode == "LAB":
        return _lab_to_rgb(image)
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # a direct conversion warns about the loss of the alpha channel
    return image.convert("RGB")


def _encode(image: Image.Image, kind: str, quality: int) -> bytes:
    buffer = io.BytesIO()
    # Keep only the first picture of an MPO (a JPEG with several). PNG stores any other format without loss.
    if kind == "MPO":
        kind = "JPEG"
    elif kind not in _ENCODERS:
        # PNG has neither floats nor integers of 32 bits.
        kind = "TIFF" if image.mode in {"F", "I"} and kind == "TIFF" else "PNG"
    image.save(buffer, kind, quality=quality)
    return buffer.getvalue()


def _parse_plain_jpeg(raw: memoryview) -> ImageHeader | None:
    """Return the header of a complete, plain JPEG (`is_plain_jpeg`); None for any file that Pillow has to read."""
    stop = len(raw)
    # The file must start with a start-of-image marker and end with an end-of-image marker.
    if stop < 4 or raw[0] != 0xFF or raw[1] != 0xD8 or raw[stop - 2] != 0xFF or raw[stop - 1] != 0xD9:
        return None
    offset = 2  # after the start-of-image marker
    size, has_swapped_sides = None, False
    components, has_rgb_mark, is_progressive = 0, False, False
    for _ in range(_MAX_SEGMENTS):
        # A segment has a marker and a length (4 bytes), then its content. `unpack_from` below reads up to byte 10.
        if offset + 10 > stop:
            return None
        start, marker, length = SEGMENT.unpack_from(raw, offset)
        if start != 0xFF:
            return None
        if marker == START_OF_SCAN:
            if components == 3 and has_rgb_mark:
                return None
            # A scan of all components of a frame that is not progressive is the only one, which saves a search.
            if size is not None and (is_progressive or raw[offset + 4] != components):
                check_scans(raw, offset, size[0] * size[1])
            return ImageHeader("JPEG", *(size[::-1] if has_swapped_sides else size)) if size is not None else None
        if length < 2:
            return None
        if marker in PLAIN_FRAMES:
            bits, height, width, components = FRAME.unpack_from(raw, offset + 4)
            is_plain = bits == 8 and components in (1, 3) and 0 < width * height < (Image.MAX_IMAGE_PIXELS or 1 << 60)
            # A file with a second frame is not plain either.
            if size is not None or not is_plain:
                return None
            size, is_progressive = (width, height), marker == PROGRESSIVE
        elif marker == _EXIF_SEGMENT:
            if bytes(raw[offset + 4 : offset + 10]) == b"Exif\0\0":
                orientation = parse_orientation(raw[offset + 10 : offset + 2 + length])
                if orientation is None:
                    return None
                has_swapped_sides = swaps_sides(orientation)
        elif marker == _MPO_SEGMENT:
            if bytes(raw[offset + 4 : offset + 8]) == b"MPF\0":
                return None  # MPO: several pictures in one file
        elif marker == _ADOBE_SEGMENT:
            # The last byte of Adobe's segment is the colour transform: 0 means none, so three components are RGB.
            transform = offset + 15
            if bytes(raw[offset + 4 : offset + 9]) == b"Adobe" and bytes(raw[transform : transform + 1]) == b"\0":
                has_rgb_mark = True
        elif marker not in _IGNORED_MARKERS:
            return None  # another coding process, or an unknown segment
        offset += 2 + length
    return None


def _read_with_pillow(content: bytes | memoryview, *, decode: bool) -> ImageHeader:
    with open_image(content) as image:
        kind, (width, height) = image.format or "?", image.size
        if swaps_sides(read_orientation(content, kind)):
            width, height = height, width
        # If `decode_jpeg` returns False, it does not support the file: Pillow decodes it. Pillow also decodes files
        # whose end does not show that they are complete: it raises an error if bytes are missing.
        is_decoded = decode and kind in {"JPEG", "MPO"} and decode_jpeg(content)
        if not is_decoded and (decode or not _is_complete(kind, content)):
            image.load()
    return ImageHeader(kind, width, height)


def _is_complete(kind: str, content: bytes | memoryview) -> bool:
    """Return whether the end of the file shows that it is complete. If False, only decoding shows whether it is."""
    raw = bytes(content)
    if kind == "JPEG":
        return raw.rfind(_END_OF_IMAGE, _scan_offset(raw)) > 0
    if kind == "PNG":
        return b"IEND" in raw[-64:]
    if kind == "WEBP":
        return len(raw) >= int.from_bytes(raw[4:8], "little") + 8
    return False


def _scan_offset(raw: bytes | memoryview) -> int:
    """Return the offset of a JPEG's scan data. The headers before it may contain a thumbnail with an end marker."""
    offset = 2  # after the marker that starts a JPEG
    for marker, start, stop in jpeg_segments(raw):
        offset = start - SEGMENT.size if marker == START_OF_SCAN else stop
    return offset

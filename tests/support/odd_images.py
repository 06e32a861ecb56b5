"""One picture as every kind of file that turns up in a folder of photographs, and as files that are no pictures."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

WIDTH, HEIGHT = 60, 44
BLACK = 40
EXIF_TIFF = b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0%c\0\0\0\0\0\0\0"  # one tag, the orientation


def picture(width=WIDTH, height=HEIGHT, seed=0):
    """Return smooth patches of colour: no two of its corners, sides or channels are alike."""
    patches = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    return b"Exif\0\0" + EXIF_TIFF % orientation


def with_alpha(image):
    alpha = np.random.default_rng(1).integers(0, 256, image.size[::-1], dtype=np.uint8)
    image = image.copy()
    image.putalpha(Image.fromarray(alpha))
    return image


def sixteen_bits(image):
    """Return the image with 16 bits a channel, the lower ones random: `uint16[height, width]` or with channels."""
    pixels = np.asarray(image).astype(np.uint16)
    return (pixels << 8) | np.random.default_rng(2).integers(0, 256, pixels.shape, dtype=np.uint16)


def png_16(pixels):
    """Encode `uint16[height, width, channels]`, which Pillow cannot write."""
    height, width, channels = pixels.shape
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def ycck(image):
    """Encode a JPEG of luma, chroma and black: CMYK's planes, and a marker that says how to read them.

    It decodes to the image below `BLACK` of 255 of black ink.
    """
    planes = [ImageOps.invert(plane) for plane in ImageOps.invert(image).convert("YCbCr").split()]
    content = bytearray(encode(Image.merge("CMYK", [*planes, Image.new("L", image.size, BLACK)]), "JPEG", quality=95))
    content[content.find(b"Adobe") + 11] = 2
    return bytes(content)


def late_exif(png, orientation):
    """Put an EXIF chunk behind the pixels of a PNG."""
    end = png.rfind(b"IEND") - 4
    return png[:end] + chunk(b"eXIf", EXIF_TIFF % orientation) + png[end:]


def taller(jpeg, height):
    """Let a JPEG's header promise more rows than there are."""
    content = bytearray(jpeg)
    frame = content.find(b"\xff\xc0")
    content[frame + 5 : frame + 7] = struct.pack(">H", height)
    return bytes(content)


def without_tiles(jpeg_2000):
    """Let a JPEG 2000's tiles be 0 pixels wide: some decoders divide by it, which ends the process."""
    content = bytearray(jpeg_2000)
    start = content.find(b"\xff\x51") + 22
    content[start : start + 4] = bytes(4)
    return bytes(content)


def good_images():
    """Return files by name, all of which decode."""
    image = picture()
    grey, palette = image.convert("L"), image.convert("P", palette=Image.Palette.ADAPTIVE)
    files = {
        "baseline.jpg": encode(image, "JPEG", quality=95),
        "progressive.jpg": encode(image, "JPEG", quality=95, progressive=True),
        "grey.jpg": encode(grey, "JPEG", quality=95),
        "cmyk.jpg": encode(image.convert("CMYK"), "JPEG", quality=95),
        "ycck.jpg": ycck(image),
        "plain.png": encode(image, "PNG"),
        "grey.png": encode(grey, "PNG"),
        "grey-16.png": encode(Image.fromarray(sixteen_bits(grey)), "PNG"),
        "colour-16.png": png_16(sixteen_bits(image)),
        "grey-alpha.png": encode(with_alpha(grey), "PNG"),
        "rgba.png": encode(with_alpha(image), "PNG"),
        "rgba-16.png": png_16(sixteen_bits(with_alpha(image))),
        "palette.png": encode(palette, "PNG"),
        "palette-one-clear.png": encode(palette, "PNG", transparency=3),
        "palette-alpha.png": encode(palette, "PNG", transparency=bytes(range(256))),
        "black-white.png": encode(image.convert("1"), "PNG"),
        "lossy.webp": encode(image, "WEBP", quality=90),
        "lossless.webp": encode(image, "WEBP", lossless=True),
        "rgba.webp": encode(with_alpha(image), "WEBP", lossless=True, exact=True),
        "animated.webp": encode(image, "WEBP", save_all=True, append_images=[image.rotate(180)]),
        "lossless-profile.webp": encode(image, "WEBP", lossless=True, icc_profile=b"x" * 128),
        "plain.bmp": encode(image, "BMP"),
        "plain.tif": encode(image, "TIFF"),
        "lzw.tif": encode(image, "TIFF", compression="tiff_lzw"),
        "grey-16.tif": encode(Image.fromarray(sixteen_bits(grey)), "TIFF"),
        "float.tif": encode(Image.fromarray(np.asarray(grey).astype(np.float32) / 255), "TIFF"),
        "black-white.tif": encode(image.convert("1"), "TIFF"),
        "gif-called.jpg": encode(image, "GIF"),
        "png-called.jpg": encode(image, "PNG"),
        "jpeg2000-called.jpg": encode(image, "JPEG2000"),
    }
    for turn in range(1, 9):
        files[f"turned-{turn}.jpg"] = encode(image, "JPEG", quality=95, exif=exif(turn))
        files[f"turned-{turn}.png"] = encode(image, "PNG", exif=exif(turn))
        files[f"turned-{turn}-late.png"] = late_exif(encode(image, "PNG"), turn)
        files[f"turned-{turn}.webp"] = encode(image, "WEBP", quality=90, exif=exif(turn))
        files[f"turned-{turn}-lossless.webp"] = encode(image, "WEBP", lossless=True, exif=exif(turn))
        files[f"turned-{turn}.tif"] = encode(image, "TIFF", tiffinfo={0x0112: turn})
    return files


def bad_images():
    """Return files by name that are no pictures, or not whole ones, each with what is said of it.

    Those that have a header are 200 pixels wide, and none have row 149.
    """
    image = picture(200, 150)
    jpeg, progressive = encode(image, "JPEG", quality=95), encode(image, "JPEG", quality=95, progressive=True)
    png, webp = encode(image, "PNG"), encode(image, "WEBP", quality=95)
    integers = Image.fromarray(np.asarray(image.convert("L")).astype(np.int32) << 16)
    return {
        "empty.jpg": (b"", "empty file"),
        "page.jpg": (b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n", "not an image"),
        "cut.jpg": (jpeg[: len(jpeg) * 6 // 10], "does not decode"),
        "cut-progressive.jpg": (progressive[: len(progressive) * 6 // 10], "does not decode"),
        "promises-more.jpg": (taller(jpeg, 600)[:-2], "does not decode"),
        "header-only.jpg": (jpeg[:200], "does not decode"),
        "cut.png": (png[: len(png) * 6 // 10], "does not decode"),
        "cut.webp": (webp[: len(webp) * 6 // 10], "does not decode|not an image"),
        "no-tiles.jpg": (without_tiles(encode(image, "JPEG2000")), "does not decode|not an image"),
        "integers.tif": (encode(integers, "TIFF"), "32-bit integer pixels"),
    }

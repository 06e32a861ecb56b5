"""Images and image folders that tests make."""

import io

import numpy as np
from PIL import Image


def jpeg(width=40, height=30, seed=0, **options):
    """Return an encoded image of blocks of colour."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def write_folder(folder, counts, *, start=0):
    """Write `counts[split][class]` images of growing sizes as an image folder; returns it."""
    number = start
    for split, classes in counts.items():
        for name, count in classes.items():
            target = folder / split / name
            target.mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                width, height = 32 + number % 17, 24 + number % 13
                (target / f"{number:05d}.jpg").write_bytes(jpeg(width, height, seed=number))
                number += 1
    return folder

"""Write scikit-learn's bundled handwritten digits as an image folder of JPEGs.

1,797 real scans (8x8 pixels, 17 grey levels; Alpaydin and Kaynak, UCI 1998) are enlarged to 64x64 and written as
`FOLDER/{train,val}/{0..9}/NUMBER.jpg`, every fifth of a seeded shuffle held out. The same seed gives the same bytes.

    python tools/make_digits.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 64
HELD_OUT_EVERY = 5
JPEG_QUALITY = 92


def write_digits(folder: Path, seed: int) -> dict[str, int]:
    """Write the folder; returns how many images each split has."""
    digits = load_digits()
    counts = {"train": 0, "val": 0}
    for rank, number in enumerate(np.random.default_rng(seed).permutation(len(digits.images)).tolist()):
        split = "val" if rank % HELD_OUT_EVERY == 0 else "train"
        target = folder / split / str(digits.target[number]) / f"{number:04d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        levels = (digits.images[number] * 255 / 16).round().astype(np.uint8)
        enlarged = Image.fromarray(levels).resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")
        enlarged.save(target, "JPEG", quality=JPEG_QUALITY)
        counts[split] += 1
    return counts


def main() -> None:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = write_digits(arguments.folder, arguments.seed)
    print(f"{counts['train']} training and {counts['val']} held-out digits in {arguments.folder}")


if __name__ == "__main__":
    main()

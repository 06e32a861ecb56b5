"""Write small real examples of every source that `datasvc ingest` reads, for docs/reference/sources.md and for tests.

They hold scans of digits, photos, measured flowers and texts that scikit-learn bundles: nothing is downloaded. Each
lies in a folder of its own below FOLDER, and `tokenizer.json` beside them. The same seed gives the same bytes.

    python tools/make_sources.py FOLDER [--images 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from example_sources import arrays, image_files, mds, messages, recordio, tables, tars
from example_sources.contents import Contents, read_contents

WRITERS: Final[Mapping[str, Callable[[Path, Contents], None]]] = {
    "folder": image_files.write_folder,
    "flat": image_files.write_flat,
    "manifest": image_files.write_manifests,
    "imagenet": tars.write_imagenet,
    "webdataset": tars.write_webdataset,
    "webdataset-compressed": tars.write_compressed_webdataset,
    "parquet": tables.write_parquet,
    "arrow": tables.write_arrow,
    "csv": tables.write_csv,
    "json-lines": tables.write_json_lines,
    "huggingface": tables.write_huggingface,
    "huggingface-hub": tables.write_huggingface_hub,
    "lmdb": messages.write_caffe_lmdb,
    "lmdb-pixels": messages.write_caffe_pixels,
    "lmdb-plain": messages.write_plain_lmdb,
    "tfrecord": messages.write_tfrecord,
    "recordio": recordio.write_recordio,
    "mds": mds.write_mds,
    "npy": arrays.write_npy,
    "npz": arrays.write_npz,
    "text": arrays.write_texts,
    "text-lines": arrays.write_text_lines,
}
MIN_IMAGES: Final = 60


def write_sources(folder: Path, num_images: int, seed: int) -> None:
    """Write all examples into a folder that is not there yet, or is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = read_contents(num_images, seed)
    for name, write in WRITERS.items():
        write(folder / name, contents)
    arrays.write_tokenizer(folder / "tokenizer.json")


def main() -> None:
    """Parse the command line and write the examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100, help=f"digits, at least {MIN_IMAGES} (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.images < MIN_IMAGES:
        sys.exit(f"--images is {arguments.images}; expected at least {MIN_IMAGES}: a digit of each kind is needed")
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        sys.exit(f"{arguments.folder} is not empty; name a new folder")
    write_sources(arguments.folder, arguments.images, arguments.seed)
    print(f"{len(WRITERS)} examples of sources in {arguments.folder}: {', '.join(WRITERS)}")


if __name__ == "__main__":
    main()

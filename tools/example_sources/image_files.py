"""Image files: in class folders, flat, and named by manifests."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .contents import Contents, Digit

MANIFEST_COLUMNS = ("file", "label", "split", "number", "ink")


def write_folder(folder: Path, contents: Contents) -> None:
    """Write `SPLIT/CLASS/NUMBER.jpg`."""
    for digit in contents.digits:
        target = folder / digit.split / digit.name / f"{digit.number:04d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(digit.jpeg)


def write_flat(folder: Path, contents: Contents) -> None:
    """Write photos side by side."""
    folder.mkdir(parents=True)
    for name, photo in contents.photos.items():
        (folder / name).write_bytes(photo)


def write_manifests(folder: Path, contents: Contents) -> None:
    """Write `images/NUMBER.jpg` and what is known of them, three times: as CSV, JSON lines and Parquet."""
    (folder / "images").mkdir(parents=True)
    for digit in contents.digits:
        (folder / "images" / f"{digit.number:04d}.jpg").write_bytes(digit.jpeg)
    rows = [manifest_row(digit) for digit in contents.digits]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, MANIFEST_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (folder / "digits.csv").write_text(text.getvalue())
    (folder / "digits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "digits.parquet")


def manifest_row(digit: Digit) -> dict[str, object]:
    """Return what the manifests say of a digit; `ink` is its mean level."""
    values = (f"{digit.number:04d}.jpg", digit.name, digit.split, digit.number, float(digit.levels.mean()))
    return dict(zip(MANIFEST_COLUMNS, values, strict=True))

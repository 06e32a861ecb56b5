"""Tables: Parquet, Arrow, CSV, JSON lines, and Hugging Face's folders."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from .contents import HELD_OUT, NAMES, TRAIN, Contents, Digit, Iris

_DIGIT_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("image", pa.binary()),
        ("label", pa.int64()),
        ("levels", pa.list_(pa.uint8())),
        ("ink", pa.struct([("mean", pa.float64()), ("max", pa.int32())])),
    ]
)
_FEATURES = {"image": {"_type": "Image"}, "label": {"names": list(NAMES), "_type": "ClassLabel"}}
_HUGGINGFACE_SCHEMA = pa.schema(
    [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)
_ROW_GROUP_SAMPLES = 25
IRIS_COLUMNS = ("id", "sepal_length", "sepal_width", "petal_length", "petal_width", "species", "label")


def write_parquet(folder: Path, contents: Contents) -> None:
    """Write two files of the training digits and one of the others."""
    folder.mkdir(parents=True)
    train = contents.digits_of(TRAIN)
    halves = {"train-00000-of-00002": train[0::2], "train-00001-of-00002": train[1::2]}
    for name, digits in {**halves, "val-00000-of-00001": contents.digits_of(HELD_OUT)}.items():
        pq.write_table(digit_table(digits), folder / f"{name}.parquet", row_group_size=_ROW_GROUP_SAMPLES)


def write_arrow(folder: Path, contents: Contents) -> None:
    """Write an IPC file, a Feather file and an IPC stream."""
    folder.mkdir(parents=True)
    train = contents.digits_of(TRAIN)
    with pa.ipc.new_file(folder / "train-0.arrow", _DIGIT_SCHEMA) as file:
        file.write_table(digit_table(train[0::2]))
    pyarrow.feather.write_feather(digit_table(train[1::2]), folder / "train-1.feather", compression="zstd")
    with pa.ipc.new_stream(folder / "val-0.arrows", _DIGIT_SCHEMA) as file:
        file.write_table(digit_table(contents.digits_of(HELD_OUT)))


def write_csv(folder: Path, contents: Contents) -> None:
    """Write `train.csv` and `val.csv.gz`."""
    folder.mkdir(parents=True)
    (folder / "train.csv").write_bytes(_csv(contents.irises_of(TRAIN)))
    (folder / "val.csv.gz").write_bytes(gzip.compress(_csv(contents.irises_of(HELD_OUT)), mtime=0))


def write_json_lines(folder: Path, contents: Contents) -> None:
    """Write `train.jsonl` and `val.jsonl`, whose objects hold objects and lists."""
    folder.mkdir(parents=True)
    for split in (TRAIN, HELD_OUT):
        (folder / f"{split}.jsonl").write_text(_lines(map(iris_object, contents.irises_of(split))))


def write_huggingface(folder: Path, contents: Contents) -> None:
    """Write what `DatasetDict.save_to_disk` writes."""
    folder.mkdir(parents=True)
    splits = {"train": TRAIN, "validation": HELD_OUT}
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, digits in splits.items():
        (folder / split).mkdir()
        with pa.ipc.new_stream(folder / split / "data-00000-of-00001.arrow", _HUGGINGFACE_SCHEMA) as file:
            file.write_table(_huggingface_table(contents.digits_of(digits)))
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_format_type": None, "_split": split}
        (folder / split / "state.json").write_text(json.dumps(state, indent=2))
        (folder / split / "dataset_info.json").write_text(json.dumps({"features": _FEATURES}, indent=2))


def write_huggingface_hub(folder: Path, contents: Contents) -> None:
    """Write Parquet files as a repository of the hub holds them."""
    (folder / "data").mkdir(parents=True)
    for split, digits in {"train": TRAIN, "validation": HELD_OUT}.items():
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        pq.write_table(_huggingface_table(contents.digits_of(digits)), path)


def digit_row(digit: Digit) -> dict[str, Any]:
    """Return a digit as a row of Parquet and Arrow."""
    return {
        "id": digit.number,
        "image": digit.jpeg,
        "label": digit.label,
        "levels": digit.levels.reshape(-1).tolist(),
        "ink": {"mean": float(digit.levels.mean()), "max": int(digit.levels.max())},
    }


def digit_table(digits: Sequence[Digit]) -> pa.Table:
    """Return digits as a table."""
    return pa.Table.from_pylist([digit_row(digit) for digit in digits], _DIGIT_SCHEMA)


def iris_row(iris: Iris) -> dict[str, Any]:
    """Return a flower as a row of CSV."""
    values = (iris.key, *iris.sepal, *iris.petal, iris.species, iris.label)
    return dict(zip(IRIS_COLUMNS, values, strict=True))


def iris_object(iris: Iris) -> dict[str, Any]:
    """Return a flower as an object of JSON lines."""
    sepal, petal = (dict(zip(("length", "width"), sides, strict=True)) for sides in (iris.sepal, iris.petal))
    return {"key": iris.key, "sepal": sepal, "petal": petal, "sizes": [*iris.sepal, *iris.petal], "label": iris.label}


def _csv(irises: Sequence[Iris]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, IRIS_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(iris_row, irises))
    return text.getvalue().encode()


def _lines(objects: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(each)}\n" for each in objects)


def _huggingface_table(digits: Sequence[Digit]) -> pa.Table:
    rows = [
        {"image": {"bytes": digit.jpeg, "path": f"{digit.number:04d}.jpg"}, "label": digit.label} for digit in digits
    ]
    return pa.Table.from_pylist(rows, _HUGGINGFACE_SCHEMA)

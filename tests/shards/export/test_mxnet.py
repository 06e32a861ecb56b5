"""MXNet exports, read by DALI's reader of RecordIO."""

import struct
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nvidia.dali import fn, pipeline_def

from datasvc.errors import ConfigError
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg
from tests.shards.export.contents import exported
from tests.shards.export.export_laws import ExportLaws

MAGIC = struct.pack("<I", 0xCED7230A)


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def records(file, index):
    image, label = fn.readers.mxnet(path=[str(file)], index_path=[str(index)])
    return image, label


def read(folder, split="train", label_type=int):
    """Return image and label by DALI, and the key in the list, of each image in the order of the file."""
    lines = [line.split("\t") for line in (folder / f"{split}.lst").read_text().splitlines()]
    if not lines:
        return []
    pipe = records(folder / f"{split}.rec", folder / f"{split}.idx")
    pipe.build()
    samples = []
    for _, *labels, key in lines:
        image, label = (np.asarray(output.as_array())[0] for output in pipe.run())
        assert label.tolist() == [float(each) for each in labels]
        value = label.tolist() if label_type is list else label_type(label.item())
        samples.append({"key": unquote(key), "image": image.tobytes(), "label": value})
    return samples


class TestMxnetExport(ExportLaws):
    format = "mxnet"
    refuses_rich = "mxnet cannot hold the column 'caption' of string"
    refuses_tokens = "has no column 'image'"

    def read(self, folder, split):
        return read(folder, split.name)


def write_labels(repository, data_type, labels, keys=None, blobs=None):
    """Ingest images with labels of a type, in this order."""
    columns = {
        "key": keys or [f"k{number}" for number in range(len(labels))],
        "image": blobs or [jpeg(seed=number) for number in range(len(labels))],
        "label": pa.array(labels, data_type),
    }
    file = repository.storage.local_path("").parent / "labels.parquet"
    pq.write_table(pa.table(columns), file)
    ingest(repository, str(file), "labels", keep_order=True)
    return open_dataset(repository, "labels")


def test_magic_numbers_inside_of_images_are_read_by_dali_and_come_back(repository, tmp_path):
    image = jpeg()
    # In a comment of the JPEG, at each of the four alignments.
    pieces = [
        MAGIC,
        MAGIC * 3,
        b"x" + MAGIC,
        b"xy" + MAGIC + b"z" * 6 + MAGIC,
        b"xyz" + MAGIC,
        bytes(4) + MAGIC + bytes(4),
    ]
    blobs = [image[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(piece)) + piece + image[2:] for piece in pieces]
    blobs += [blob + MAGIC for blob in blobs]
    keys = [f"{number}" for number in range(100, 100 + len(blobs))]
    dataset = write_labels(repository, pa.int32(), [*range(len(blobs))], keys, blobs)
    exported(dataset, tmp_path / "out", "mxnet")
    assert (tmp_path / "out" / "train.rec").read_bytes().count(MAGIC) > len(blobs)
    expected = [(sample["key"], sample["image"], sample["label"]) for sample in dataset["train"]]
    assert [tuple(sample.values()) for sample in read(tmp_path / "out")] == expected
    ingest(repository, str(tmp_path / "out"), "back", keep_order=True)
    found = open_dataset(repository, "back")["train"]
    assert [(sample["key"], sample["image"], sample["label"]) for sample in found] == expected


@pytest.mark.parametrize(
    ("data_type", "labels"),
    [
        (pa.float32(), [0.5, -1.0]), (pa.list_(pa.float32()), [[4.0, 5.0, 0.25], [1.0]]),
        (pa.list_(pa.int16()), [[1, 2], [3]]),
    ],
)  # fmt: skip
def test_floats_and_lists_of_labels_come_back(repository, tmp_path, data_type, labels):
    exported(write_labels(repository, data_type, labels), tmp_path / "out", "mxnet")
    label_type = list if pa.types.is_list(data_type) else float
    assert [sample["label"] for sample in read(tmp_path / "out", label_type=label_type)] == labels
    ingest(repository, str(tmp_path / "out"), "back", keep_order=True)
    assert [sample["label"] for sample in open_dataset(repository, "back")["train"]] == labels


@pytest.mark.parametrize(
    ("data_type", "label", "message"),
    [
        (pa.int32(), 2**24 + 1, "cannot hold the label 16777217 of sample 'k0'"), (pa.int32(), None, "a null"),
        (pa.list_(pa.float32()), [], "cannot hold the label"), (pa.list_(pa.float32()), [1.0, None], "a null"),
        (pa.float64(), 0.1, "'label' of double"),
    ],
)  # fmt: skip
def test_labels_that_float32_cannot_hold_are_refused(repository, tmp_path, data_type, label, message):
    with pytest.raises(ConfigError, match=message):
        exported(write_labels(repository, data_type, [label]), tmp_path / "out", "mxnet")
    assert not list(tmp_path.rglob("train.*"))


@pytest.mark.parametrize(
    ("keys", "ids"),
    [(["7", "0", f"{10**19 - 1}"], [7, 0, 10**19 - 1]), (["7", "00", "1"], [0, 1, 2]), (["1", "2", "1e"], [0, 1, 2])],
)
def test_keys_that_are_all_numbers_are_the_numbers_of_the_images(repository, tmp_path, keys, ids):
    exported(write_labels(repository, pa.int32(), [1, 2, 3], keys), tmp_path / "out", "mxnet")
    lines = (tmp_path / "out" / "train.idx").read_text().splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == ids
    assert [sample["key"] for sample in read(tmp_path / "out")] == keys

"""Versions to export, and the digests by which an export is judged."""

import hashlib

import numpy as np
import pyarrow as pa

from datasvc.shards import open_dataset
from datasvc.shards.export import export
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.schema import image_schema, shard_schema
from datasvc.shards.images.header import read_header
from tests.samples import jpeg
from tests.shards.written_versions import write_version

KEY_FIELD = pa.field("key", pa.string(), nullable=False)
CLASSES = ("cat", "dog")
# What people call files, and what nobody should.
ODD_KEYS = (
    "cat/1.jpg", "dog/1.JPEG", "a_b.jpg", "a/b.jpg", "a/b", "a.b/c.d.e.jpg", "../../etc/passwd", "/abs.jpg", "x//y",
    ".", "..", ".hidden/x", "__meta__/x.jpg", "100%", "100%25", "a%2Fb", "naïve/ключ/日本.png", "sp ace /x.",
    "new\nline", "c:\\x", "*?<>|", "x" * 300 + ".jpg", "/".join(["deep"] * 400),
)  # fmt: skip
PHOTOS = image_schema(labelled=True)
BOXED = shard_schema(
    [
        *image_schema(labelled=False),
        pa.field("boxes", pa.list_(pa.list_(pa.float64(), 4))),
        pa.field("box_labels", pa.list_(pa.int32())),
    ]
)
RICH = shard_schema(
    [
        KEY_FIELD,
        pa.field("image", pa.large_binary()),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("label", pa.int32()),
        pa.field("caption", pa.string()),
        pa.field("Source", pa.string()),
        pa.field("mask", pa.large_binary()),
        pa.field("score", pa.float32()),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("views", pa.int64()),
        pa.field("small", pa.uint8(), nullable=False),
        pa.field("is_good", pa.bool_()),
        pa.field("boxes", pa.list_(pa.struct([("x", pa.float32()), ("names", pa.list_(pa.string()))]))),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("counts", pa.list_(pa.int16())),
    ]
)
TOKENS = shard_schema(
    [
        KEY_FIELD,
        pa.field("tokens", pa.list_(pa.int32(), 8), nullable=False),
        pa.field("ids", pa.list_(pa.uint16()), nullable=False),
        pa.field("embedding", pa.list_(pa.float32()), nullable=False),
    ]
)


def photo(key, seed=0, label=0):
    blob = jpeg(20 + seed, 16, seed=seed)
    header = read_header(blob)
    return {"key": key, "image": blob, "width": header.width, "height": header.height, "label": label}


def photos(keys, start=0):
    return [photo(key, start + number, number % len(CLASSES)) for number, key in enumerate(keys)]


def rich(key, seed):
    """A sample whose columns are null now and then, each in its own rhythm."""
    blob = jpeg(20, 16, seed=seed)
    values = {
        "image": blob, "label": seed % 2, "caption": f"zwei\n{seed} ✓", "Source": "Web", "mask": bytes(range(seed)),
        "score": float(np.float32(0.1) * seed), "weight": 0.1 * seed, "views": -(2**53) - seed, "small": seed,
        "is_good": seed % 3 == 0, "boxes": [{"x": 0.5, "names": ["a", None]}] * (seed % 3),
        "tags": ["t"] * (seed % 4), "counts": list(range(seed % 5)),
    }  # fmt: skip
    for rhythm, name in enumerate(values):
        if RICH.field(name).nullable and seed % (rhythm + 3) == 2:
            values[name] = None
    measured = {"width": 0, "height": 0} if values["image"] is None else {"width": 20, "height": 16}
    return {"key": key, **measured, **values}


def tokens(key, seed):
    generator = np.random.default_rng(seed)
    return {
        "key": key,
        "tokens": generator.integers(-(2**31), 2**31, 8).tolist(),
        "ids": generator.integers(0, 2**16, 1 + seed * 100).tolist(),
        "embedding": generator.random(3, np.float32).tolist(),
    }


def write_photos(repository, keys=None, *, shards=2, name="photos", boxed=False):
    """`boxed`: the label is that of a box, instead of the photo."""
    keys = keys or [f"{CLASSES[number % 2]}/{number:03d}.jpg" for number in range(7)]
    samples, held_out = photos(keys), photos(["v/1.jpg", "v/2.jpg"], 40)
    if boxed:
        for sample in (*samples, *held_out):
            sample |= {"boxes": [[1.0, 2.0, 15.0, 12.5]], "box_labels": [sample.pop("label")]}
    size = -(-len(samples) // shards)
    train = [samples[start : start + size] for start in range(0, len(samples), size)]
    schema, classes = (BOXED, ()) if boxed else (PHOTOS, CLASSES)
    write_version(repository, name, {"train": train, "val": [held_out]}, schema, classes)
    return open_dataset(repository, name)


def write_rich(repository, *, name="rich", count=24, **fixed):
    samples = [{**rich(f"r/{seed}", seed), **fixed} for seed in range(count)]
    write_version(repository, name, {"train": [samples[: count // 2], samples[count // 2 :]]}, RICH, CLASSES)
    return open_dataset(repository, name)


def write_tokens(repository, *, name="tokens"):
    write_version(
        repository,
        name,
        {"train": [[tokens(f"{seed}", seed) for seed in part] for part in ((0, 1), (2, 3, 4))]},
        TOKENS,
    )
    return open_dataset(repository, name)


def exported(dataset, destination, export_format, **options):
    return export(dataset.repository, str(dataset.resolved), str(destination), export_format, **options)


def digests(samples, schema):
    """Return the sample digest of each key, of samples as dicts; columns they lack are null."""
    rows = list(samples)
    batch = pa.RecordBatch.from_pylist(
        [{field.name: row.get(field.name) for field in schema} for row in rows],
        pa.schema([field.with_nullable(True) for field in schema]),
    )
    keys = batch.column("key").to_pylist()
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, digest_batch(batch)[0], strict=True))


def version_digests(split):
    """Return what an export must give back."""
    return digests(split, split.table.sample_schema)


def files(folder):
    """Return the content of every file below a folder, by relative path."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}

"""Every format that the page formats.md defines, byte by byte.

The files in `golden/` were written by the first release of each format and must open for ever; writing the same
content must give the same bytes. A new format gets new files beside the old ones, which
`python tests/formats/test_golden.py` writes; a file that is here never changes.
"""

import dataclasses
import datetime as dt
import enum
import io
import json
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from xxhash import xxh3_128, xxh3_128_digest

from datasvc.errors import ConfigError
from datasvc.ledger.signals import read_signal
from datasvc.loaders.augment.augment import AugmentConfig, plan_random_windows
from datasvc.loaders.core.mixture import Mixture, MixtureStage
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.core.state import save_state
from datasvc.models.provenance.consumed_ranges import parse_use
from datasvc.models.provenance.key_lookup import mix_order
from datasvc.models.tensors import codec
from datasvc.models.tensors.chunk_writer import find_chain, pointer_path, write_pointer
from datasvc.models.tensors.container_types import tied_tensors
from datasvc.models.tensors.state_tree import decode_state, encode_state, flatten, unflatten
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord, encode_table, read_table
from datasvc.models.versions.data_use import DataUse
from datasvc.order import AccessOrder, OrderConfig, OrderState
from datasvc.repository import Digest, Entry, ObjectInfo, Objects, Repository, Storage
from datasvc.repository.branching import create_branch, remove_branch
from datasvc.repository.logs.branches import line_fields
from datasvc.repository.logs.copies import read_copy_log
from datasvc.repository.logs.log import decode_entry, decode_log_entry, encode_entry
from datasvc.repository.logs.redactions import Redaction, Redactions
from datasvc.repository.logs.references import LineName
from datasvc.repository.objects.intact import mark_intact
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.removal import remove_versions
from datasvc.runs import RunEvent
from datasvc.runs.content import Content
from datasvc.runs.part import Part, PartRange, decode_part, encode_part
from datasvc.runs.step_table import StepTable
from datasvc.shards import Shard, ShardStatistics, ShardTable, ShardWriter, image_schema
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.ipc_reader import encode_table as encode_ipc
from datasvc.shards.format.ipc_reader import read_table as read_ipc
from datasvc.shards.format.overlays import (
    ColumnOverlay,
    DenseWriter,
    OverlayGroup,
    Overlays,
    encode_values,
    shards_of,
    sparse_table,
    streams_of,
)
from datasvc.shards.format.partial_reader import PartialShard
from datasvc.shards.format.salvage import missing_rows, sample_identities
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import has_compression, shard_schema, with_compression
from datasvc.shards.format.shard_table import TableRow
from datasvc.shards.format.view_table import EpochGrid, Grouping, Packing, ViewOrigin, WeightPack
from datasvc.shards.ingestion.plan import plan_shards
from datasvc.shards.lines.commit import commit_on_line
from datasvc.shards.packing.best_fit import pack_documents
from datasvc.shards.packing.groups import Aspects, GroupedOrder, encode_aspects
from datasvc.shards.packing.pack_objects import PackWriter
from datasvc.shards.packing.packs import Packs, encode_packs
from datasvc.shards.sources import ListedFile
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import Deletions
from datasvc.shards.versions.weights import Weights

GOLDEN = Path(__file__).parent / "golden"
SAMPLES = [
    {"key": "cat/1.jpg", "image": b"\xff\xd8cat\xff\xd9", "width": 3, "height": 2, "label": 0},
    {"key": "dög/2.jpg", "image": b"\xff\xd8dog!\xff\xd9", "width": 5, "height": 4, "label": 1},
]
STATISTICS = ShardStatistics(2, 5, 4, 8)
SHARD = ObjectInfo(Digest("0123456789abcdef" * 4), 1234)
ENTRY = {
    "format": 1,
    "commit": "00112233445566778899aabbccddeeff",
    "created": "2026-01-02T03:04:05+00:00",
    "message": "größer",
    "splits": {"train": {"table": "ab" * 32, "samples": 2, "bytes": 1234, "shards": 1}},
}
RUN_HEAD = {
    "run": "digits-cnn/20261123-221830-3fa9c1",
    "attempt": 1,
    "writer": "0011223344556677",
    "time": 2.0,
    "heartbeat_s": 20.0,
    "world_size": 4,
    "data": ["digits@1"],
    "state": "running",
    "message": "",
    "latest": {"step": 3, "loss": 4.0, "unit": "images"},
    "versions": ["digits-cnn@1"],
    "lost": 0,
}
RUN_STEPS = StepTable(  # a bin of two steps, and one of one
    ("loss", "rate"),
    first=np.array([1, 3]),
    last=np.array([2, 3]),
    counts=np.array([2, 1]),
    times=np.array([1.5, 1.75]),
    mean=np.array([[2.0, 0.5], [4.0, 0.5]]),
    low=np.array([[1.0, 0.5], [4.0, 0.5]]),
    high=np.array([[3.0, 0.5], [4.0, 0.5]]),
)
RUN_EVENTS = (RunEvent(1.625, "checkpoint", {"step": 2, "version": "digits-cnn@1"}),)
RUN_PART = Part(PartRange(1, 1, 8), RUN_HEAD, Content((RUN_STEPS,), RUN_EVENTS, 3))
RAW = ChainLink(Digest("01" * 32), 24, 0, 24, "raw")
PACKED = ChainLink(Digest("03" * 32), 16, 8, 8, "raw")
CHAIN = (ChainLink(Digest("04" * 32), 30, 0, 15, "planes"), ChainLink(Digest("05" * 32), 9, 0, 9, "difference"))
RECORDS_1 = (
    TensorRecord("model.w", "float32", (2, 3), (Chunk((0, 0), (2, 3), Digest("01" * 32), (RAW,)),)),
    TensorRecord("step", "int64", (), (Chunk((), (), Digest("02" * 32), (PACKED,)),)),
)
RECORDS = (
    TensorRecord("empty", "bool", (0, 2), ()),
    TensorRecord(
        "model.w",
        "float32",
        (2, 4),
        (
            Chunk((0, 0), (2, 2), Digest("02" * 32), CHAIN),
            Chunk((0, 2), (2, 2), Digest("06" * 32), (*CHAIN, dataclasses.replace(CHAIN[1], encoding="xor"))),
        ),
    ),
    RECORDS_1[1],
)
WORDS = np.arange(1000, dtype=np.uint32) ** 2
PLANES = {
    "planes-1.bin": ("planes", WORDS),
    "xor-1.bin": ("xor", WORDS + 3),
    "difference-1.bin": ("difference", WORDS - 3),
}
STATE = {"step": 7, "pair": (1, "x"), 3: None, "inf": float("inf"), "raw": b"\x00\xff", "w": torch.zeros(1)}


class Pair(NamedTuple):
    first: int
    second: float


Pair.__module__ = "optimizers"  # the same, whether pytest or a command line runs this file


class Kind(enum.Enum):
    A = "a"


@dataclasses.dataclass
class Options:
    rate: float


Kind.__module__ = Options.__module__ = "optimizers"
VALUES_STATE = {
    "values": [
        Counter(a=1),
        defaultdict(list, {3: [1]}),
        deque([1], maxlen=2),
        {1, "a"},
        frozenset([2]),
        range(3),
        slice(1, None),
        1 + 2j,
        bytearray(b"a"),
        np.float32(0.1),
        np.datetime64("2026-01-02"),
        dt.date(2026, 1, 2),
        dt.time(1, 2),
        dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        dt.timedelta(1),
        Decimal("1.10"),
        Fraction(1, 3),
        UUID(int=5),
        Path("/data"),
        PurePosixPath("a"),
        PureWindowsPath("c:"),
        Namespace(lr=0.1),
        SimpleNamespace(a=1),
        Kind.A,
        Options(1),
        torch.Size([2]),
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        torch.device("cpu"),
    ]
}
WRAPPED_STATE = {"w": TwoTensor(torch.zeros(2), torch.ones(2))}
TYPED_STATE = {"model": OrderedDict(w=STATE["w"], tied=STATE["w"].detach()), "pair": Pair(1, 0.5)}
LOADER_STATE = OrderState("ab" * 32, 2, 17, OrderConfig(seed=5, shuffle="windowed", lanes=4, block=100, sticky=True))


# Whose record batch has a frame: its image is large beside all else.
LARGE = [
    {"key": "cat/1.jpg", "image": b"\xff\xd8" + bytes(1 << 16) + b"\xff\xd9", "width": 3, "height": 2, "label": 0}
]


def write_shard(samples=SAMPLES):
    """Return a shard's bytes, and the layout of its record batches."""
    sink = io.BytesIO()
    with ShardWriter(sink, image_schema(labelled=True)) as writer:
        for sample in samples:
            writer.append(sample)
    return sink.getvalue(), writer.layout


CAPTIONED = with_compression(
    shard_schema([*image_schema(labelled=True), pa.field("caption", pa.string())]), compressed=True
)
CAPTIONS = [
    {**LARGE[0], "key": f"cat/{number}.jpg", "image": bytes([number]) * (1 << 14), "caption": "a cat " * number}
    for number in range(9, 17)
]


def captioned_shard():
    """Return a shard with compressed captions, and its index."""
    sink = io.BytesIO()
    with ShardWriter(sink, CAPTIONED) as writer:
        for sample in CAPTIONS:
            writer.append(sample)
    digests = digest_batch(pa.RecordBatch.from_pylist(CAPTIONS, CAPTIONED))
    return sink.getvalue(), SampleIndex.build([each["key"] for each in CAPTIONS], *digests, writer.layout)


def parted_index():
    """Return the index of a shard whose blob has parts of 10,000 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("parts", "writer"):
            patch.setattr(f"datasvc.shards.format.{module}.MIN_PARTED_BYTES", 0)
        patch.setattr("datasvc.shards.format.parts.PART_BYTES", 10_000)
        return index(LARGE)


def shard_bytes():
    return write_shard()[0]


def first_samples(config, epoch):
    shards, rows = AccessOrder([5, 0, 7, 4], config, epoch).locate(np.arange(6))
    return [f"{shard}:{row}" for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]


def orders():
    files = [ListedFile(f"{number}.jpg", "", 100, None) for number in range(8)]
    windowed = {"seed": 7, "shuffle": "windowed", "lanes": 2, "block": 3}
    sizes = np.array([500, 64]), np.array([375, 64])
    windows = plan_random_windows(*sizes, np.arange(2), seed=7, epoch=3, config=AugmentConfig())
    return {
        "global": first_samples(OrderConfig(seed=7), 0),
        "global, epoch 3": first_samples(OrderConfig(seed=7), 3),
        "windowed": first_samples(OrderConfig(**windowed), 1),
        "sticky": first_samples(OrderConfig(**windowed, sticky=True), 1),
        "ingest": [[file.key for file in shard] for shard in plan_shards(files, shard_bytes=250, seed=7)],
        "windows": [windows.starts.tolist(), windows.shapes.tolist(), windows.flips.tolist()],
    }


def index(samples=SAMPLES):
    keys = [sample["key"] for sample in samples]
    return SampleIndex.build(keys, *digest_batch(batch(samples)), write_shard(samples)[1])


def batch(samples=SAMPLES):
    return pa.RecordBatch.from_pylist(samples, image_schema(labelled=True))


def redactions():
    """Two purges of one shard, the second with hashed keys, and a certificate."""
    shards = [digest_of(bytes([number])) for number in range(6)]
    first = Redaction(shards[0], shards[1], ObjectInfo(shards[2], 1200), shards[3], {1: "0a" * 16})
    second = Redaction(shards[2], None, ObjectInfo(shards[4], 1100), shards[5], {0: "0b" * 16}, hash_keys=True)
    contents = [
        {"kind": "redact", "shards": [first.to_json()], "message": "request 7"},
        {"kind": "redact", "shards": [second.to_json()], "message": ""},
        {"kind": "certificate", "certificate": shards[1], "dataset": "pets", "samples": 1, "complete": True},
    ]
    return b"".join(encode_entry({**content, "format": 1}) for content in contents)


def copies():
    """An export of a view, and a transfer of two versions."""
    tables = [digest_of(bytes([number])) for number in range(3)]
    view = {"version": "pets@2[label <> 'cat']", "samples": 7, "tables": {"train": tables[0]}}
    versions = [
        {"version": f"pets@{number}", "samples": 9 + number, "tables": {"train": tables[number], "val": tables[0]}}
        for number in (1, 2)
    ]
    common = {"by": "ann@host", "created": "2026-11-29T16:59:21+00:00"}
    contents = [
        {"kind": "export", "destination": "/data/pets-wds", "redactions": 0, "versions": [view]},
        {"kind": "transfer", "destination": "s3://bucket/repo", "redactions": 3, "versions": versions},
    ]
    return b"".join(encode_entry({**content, **common, "format": 1}) for content in contents)


def redacted_overlays():
    """Two purges of samples with values beside shards: of one object twice, and of another one once."""
    names = [digest_of(bytes([number])) for number in range(6)]
    contents = [
        {"overlays": [[names[0], names[1], 300]], "overlaid": {names[5]: {"2": ["0a" * 16]}}},
        {
            "overlays": [[names[1], names[2], 200], [names[3], names[4], 100]],
            "overlaid": {names[5]: {"2": ["0b" * 16]}},
        },
    ]
    return b"".join(encode_entry({"kind": "redact", "shards": [], **each, "format": 1}) for each in contents)


def deletions():
    """Of shard 2, which has eleven samples, those in rows 0, 3 and 9; of shard 70, its only sample."""
    return Deletions.build({2: np.isin(np.arange(11), [0, 3, 9]), 5: np.zeros(4, np.bool_), 70: np.array([True])})


def overlays():
    """Return the objects of an overlay, by name: two values of labels, new scores, and a table that names them."""
    with TemporaryDirectory() as folder:
        objects = Repository.create(folder).objects
        patches = {
            0: (np.array([1, 2]), pa.array([7, None], pa.int32())),
            3: (np.array([0]), pa.array([1], pa.int32())),
        }
        sparse = objects.put(encode_ipc(sparse_table(patches, pa.int32())))
        writer = DenseWriter(objects)
        writer.add(1, pa.array([[0.5, 1.5], None], pa.list_(pa.float32(), 2)))
        dense = writer.close(3)
        names = {"caption": "text", "unused": None}
        columns = {"label": ColumnOverlay(sparse=sparse), "score": dense}
        group = OverlayGroup(3, names, columns, ColumnOverlay(sparse=sparse))
        shards = {number: digest_of(bytes([number])) for number in (0, 3)}
        named = encode_ipc(sparse_table(patches, pa.int32(), shards))
        plain = table()
        numbers = np.arange(plain.num_shards) - 1
        return {
            "overlay-1-sparse.arrow": objects.read(sparse.digest),
            "overlay-1-sparse-shards.arrow": named,
            "overlay-1-pack-shards.bin": encode_values(pa.array(["x", None]), {3: shards[3]}),
            "overlay-1-directory.arrow": objects.read(dense.directory.digest),
            "overlay-1-pack.bin": objects.read(dense.packs[0].digest),
            "table-3-overlays.arrow": plain.with_overlays(numbers, Overlays((group,))).encode(),
        }


def timed_batch():
    """Return samples with values that the formats 1 and 2 of the sample index hash as text."""
    fields = {
        "key": pa.array(["a", "b"]),
        "day": pa.array([-719163, None], pa.int32()).cast(pa.date32()),
        "span": pa.array([86_400_000_000_000, -1], pa.duration("ns")),
        "price": pa.array([Decimal("-1.50"), Decimal("7.00")], pa.decimal128(9, 2)),
        "when": pa.array([253_402_300_800_000_000, 0], pa.timestamp("us", "Europe/Berlin")),
        "clock": pa.array([1001, 1000], pa.time64("ns")),
        "past": pa.array([[1], []], pa.list_(pa.timestamp("s"))),
    }
    return pa.RecordBatch.from_arrays(list(fields.values()), names=list(fields))


def old_batch():
    """Return samples whose dates Python has, with whole microseconds."""
    fields = {
        "key": pa.array(["a", "b"]),
        "day": pa.array([0, None], pa.int32()).cast(pa.date32()),
        "span": pa.array([86_400_000_000_000, -1000], pa.duration("ns")),
        "price": pa.array([Decimal("-1.50"), Decimal("7.00")], pa.decimal128(9, 2)),
        "when": pa.array([1_000_000, 0], pa.timestamp("us", "Europe/Berlin")),
        "spans": pa.array([[1000], []], pa.list_(pa.duration("ns"))),
    }
    return pa.RecordBatch.from_arrays(list(fields.values()), names=list(fields))


def timed_index():
    samples = timed_batch()
    sink = io.BytesIO()
    with ShardWriter(sink, shard_schema(list(samples.schema))) as writer:
        writer.append_columns({"key": [b"a", b"b"]}, samples.drop_columns(["key"]))
    return SampleIndex.build(samples.column("key"), *digest_batch(samples), writer.layout)


def sized(content):
    return len(content).to_bytes(8, "little") + content


def table():
    counted = dataclasses.replace(STATISTICS, label_counts={0: 1, 1: 1}, image_kinds={"JPEG": 2})
    rows = [TableRow(SHARD, counted, Digest("cd" * 32)), TableRow(SHARD, STATISTICS)]
    built = ShardTable.build(rows, image_schema(labelled=True), ["cat", "dög"])
    return dataclasses.replace(built.with_column("deleted", [0, 1]), deletions=Digest("ef" * 32))


STICKY = OrderConfig(seed=7, shuffle="windowed", lanes=2, block=8, sticky=True)


PACK = Digest("ab" * 32)


def weighted_table(pack=PACK):
    origin = ViewOrigin(Digest("12" * 32), "pets@3", "train", ("(width > 3)", "weighted(score)"))
    return dataclasses.replace(table().with_column("weight", [7, 5]), view=origin, weights=(WeightPack(0, pack),))


def weights_bytes(folder):
    objects = Repository.create(str(folder / "weights")).objects
    packs = PackWriter(objects, "weights")
    packs.add(np.array([3, 4]))
    packs.add(np.array([5]))
    return objects.read(packs.finish()[0].digest)


def packs_bytes(folder):
    objects = Repository.create(str(folder / "packs")).objects
    packs = PackWriter(objects, "packs")
    for lengths in ([3, 0, 9, 4], [5]):
        packs.add(encode_packs(pack_documents(np.array(lengths), 7)))
    return objects.read(packs.finish()[0].digest)


def packed_table():
    packing = Packing("best-fit", 7, "tokens", 4, 21, 1, 1, 0, (WeightPack(0, PACK),))
    origin = ViewOrigin(Digest("12" * 32), "pets@3", "train", ("packed(best-fit, block_tokens=7)",))
    return dataclasses.replace(table().with_column("packs", [3, 1]), view=origin, packing=packing)


def aspects_bytes(folder):
    objects = Repository.create(str(folder / "aspects")).objects
    packs = PackWriter(objects, "aspects")
    widths, heights = np.array([[640, 480], [427, 640], [7, 7]]).T
    for first, stop in ((0, 2), (2, 3)):
        packs.add(encode_aspects(widths[first:stop], heights[first:stop]))
    return objects.read(packs.finish()[0].digest)


def grouped_table(pack=PACK):
    steps = ("weighted(score)", "grouped_by_aspect(8)")
    origin = ViewOrigin(Digest("12" * 32), "pets@3", "train", steps)
    return dataclasses.replace(weighted_table(), view=origin, grouping=Grouping(8, (WeightPack(0, pack),)))


def grouped_orders():
    """Return positions in the order without groups of the positions of some epochs of 3 blocks."""
    aspects = SimpleNamespace(group=2, span=64, of=lambda shards, rows: (60 * shards + rows) * 37 % 11)
    orders = [(OrderConfig(seed=7), 0), (OrderConfig(seed=7), 1), (STICKY, 1)]
    return [
        [part.tolist() for part in GroupedOrder(AccessOrder([60] * 4, config, epoch), aspects).locate(np.arange(240))]
        for config, epoch in orders
    ]


def grids():
    """Return how often epochs serve samples: by epoch the counts of shards, and the copies of the samples of one."""
    found = []
    for config, epoch in [(OrderConfig(seed=7), 0), (OrderConfig(seed=7), 1), (STICKY, 1), (OrderConfig(), 2)]:
        grid = EpochGrid.of_epoch(1000, 123_456_789, config, epoch)
        weights = np.array([1_000_000, 7, 90_000_000, 32_456_782])
        copies = grid.copies(1_000_000, 40, np.array([45_000_000, 2, 44_999_998]))
        found.append({"epoch": epoch, "counts": grid.counts(0, weights).tolist(), "copies": copies.tolist()})
    return found


def branch_entry():
    """Return an entry on a branch, after a main line of two versions and another branch."""
    fields = line_fields("experiment/1", {"": 2, "other/3": 3})
    return encode_entry({**ENTRY, **fields, "parent": "pets@2", "merged": ["pets@1"]})


def branches_bytes(folder):
    """Return all files of the log of a data set with branches, as JSON by path; ids and times are made up."""
    repository = Repository.create(str(folder / "branched"))
    ids = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasvc.repository.logs.log.secrets.token_hex", lambda size: f"{next(ids):0{2 * size}x}")
        patch.setattr("datasvc.repository.logs.log._now", lambda: ENTRY["created"])
        splits = {"splits": ENTRY["splits"], "message": ""}
        log = repository.versions("datasets", "pets")
        log.append(lambda _head: splits)
        for branch in ("experiment", "gone"):
            create_branch(repository, "pets", branch, message="größer")
        for line in (
            LineName("pets", "experiment"), LineName("pets"), LineName("pets", "gone"), LineName("pets", "experiment")
        ):  # fmt: skip
            commit_on_line(repository, line, lambda parent: {**splits, "parent": str(parent)})
        remove_branch(repository, "pets", "gone")
        create_branch(repository, "pets@3", "gone")
        remove_versions(repository, "datasets", ["pets@5"])
    files = sorted((folder / "branched/datasets").rglob("*.json"))
    contents = {str(path.relative_to(folder / "branched")): path.read_text() for path in files}
    return json.dumps(contents, indent=1, ensure_ascii=False).encode()


def marker_bytes(folder):
    Repository.create(str(folder))
    return (folder / "datasvc.json").read_bytes()


def pointer_bytes(folder):
    objects = Objects(Storage(str(folder)))
    write_pointer(objects, Digest("02" * 32), CHAIN)
    return (folder / pointer_path(Digest("02" * 32))).read_bytes()


class SizedSplit(Split):
    """A split of 8 samples without a shard table."""

    title = "a split without a table"

    @property
    def num_positions(self):
        return 8


def mixture_states():
    """Return the state of a mixture without stages and of one with, each with the first samples that it serves."""
    splits = [
        SizedSplit("train", f"{name}@1", SimpleNamespace(objects=None), Digest(f"{number:02}" * 32))
        for number, name in enumerate("abc")
    ]
    weights, states = (5, 3, 0), {}
    stages = [
        MixtureStage(40, {splits[0]: 1, splits[2]: 2}),
        MixtureStage(80, {splits[1]: 1, splits[2]: 1}, ramp=True),
        MixtureStage(110, {splits[0]: 1}),
    ]
    for number, later in ((1, []), (2, stages)):
        mixture = Mixture(list(zip(splits, weights, strict=True)), epoch_samples=130, block=10, stages=later)
        sources, epochs, positions = mixture.order(3).locate(0, np.arange(130))
        served = [f"{a}:{b}:{c}" for a, b, c in zip(sources, epochs, positions, strict=True)]
        content = {"state": save_state(mixture, OrderConfig(seed=3), Cursor(0, 50)), "served": served}
        states[f"mixture-state-{number}.json"] = json.dumps(content, indent=1, sort_keys=True).encode()
    return states


def written(folder):
    """Return what the formats' writers give now."""
    return {
        "repository-1.json": marker_bytes(folder),
        "entry-1.json": encode_entry(ENTRY),
        "entry-2.json": branch_entry(),
        "branches-1.json": branches_bytes(folder),
        "shard-1.arrow": shard_bytes(),
        "table-2.arrow": table().encode(),
        "table-3.arrow": weighted_table().encode(),
        "weights-1.arrow": weights_bytes(folder),
        "table-4.arrow": packed_table().encode(),
        "packs-1.arrow": packs_bytes(folder),
        "table-5.arrow": dataclasses.replace(table(), sample_schema=CAPTIONED).encode(),
        "table-6.arrow": grouped_table().encode(),
        "aspects-1.arrow": aspects_bytes(folder),
        "groups-1.json": json.dumps(grouped_orders()).encode(),
        "shard-2.arrow": captioned_shard()[0],
        "index-2-compressed.arrow": captioned_shard()[1].encode(),
        "epoch-grid-1.json": json.dumps(grids(), indent=1, sort_keys=True).encode(),
        "index-2.arrow": index().encode(),
        "index-2-frame.arrow": index(LARGE).encode(),
        "index-2-parts.arrow": parted_index().encode(),
        "index-3.arrow": timed_index().encode(),
        "deletions-1.arrow": deletions().encode(),
        "redactions-1.json": redactions(),
        "copies-1.json": copies(),
        "redactions-1-overlays.json": redacted_overlays(),
        **overlays(),
        "tensors-2.arrow": encode_table(RECORDS),
        "pointer-1.json": pointer_bytes(folder),
        "run-part-1.jsonl": encode_part(RUN_PART),
        "state-1.json": encode_state(flatten(STATE)[0]),
        "state-1-types.json": encode_state(flatten(TYPED_STATE)[0]),
        "state-1-kinds.json": encode_state(flatten(VALUES_STATE)[0]),
        "state-2.json": encode_state(flatten(WRAPPED_STATE)[0]),
        "order-1.json": json.dumps(orders(), indent=1, sort_keys=True).encode(),
        "loader-state-1.json": json.dumps(LOADER_STATE.to_dict(), sort_keys=True).encode(),
        **mixture_states(),
    }


# Earlier formats: read for ever, written no more.
ONLY_READ = {
    "table-1.arrow",
    "index-1.arrow",
    "index-2-pandas.arrow",
    "index-2-python.arrow",
    "tensors-1.arrow",
    "signal-1.parquet",
}
# Written anew they may differ: what zstd makes of bytes is its own affair.
COMPRESSED = set(PLANES) | {
    "weights-1.arrow",
    "packs-1.arrow",
    "aspects-1.arrow",
    "shard-2.arrow",
    "index-2-compressed.arrow",
}


def golden(name):
    return (GOLDEN / name).read_bytes()


def test_every_format_is_written_byte_by_byte_as_it_was(tmp_path):
    now = written(tmp_path)
    assert sorted({*now, *ONLY_READ, *COMPRESSED}) == sorted(path.name for path in GOLDEN.iterdir() if path.is_file())
    assert {name for name, content in now.items() if content != golden(name)} - COMPRESSED == set()


def test_a_repository_of_format_1_opens(tmp_path):
    (tmp_path / "datasvc.json").write_bytes(golden("repository-1.json"))
    assert Repository.open(str(tmp_path)).names("datasets") == []


def test_an_entry_of_format_1_opens():
    assert decode_entry(golden("entry-1.json"), "golden") == ENTRY


def test_an_entry_of_format_2_opens():
    content = decode_log_entry(golden("entry-2.json"), "golden")
    assert (content["branch"], content["lines"]) == ("experiment/1", {"": 2, "other/3": 3})
    assert {name: content[name] for name in ENTRY if name != "format"} == {
        name: value for name, value in ENTRY.items() if name != "format"
    }  # fmt: skip
    # As a release without branches reads it, and as a log that has none.
    with pytest.raises(ConfigError, match="has format 2; this datasvc reads up to 1: upgrade datasvc"):
        decode_entry(golden("entry-2.json"), "golden")


def test_a_data_set_with_branches_of_format_1_opens(tmp_path):
    (tmp_path / "datasvc.json").write_bytes(golden("repository-1.json"))
    for path, content in json.loads(golden("branches-1.json")).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    repository = Repository.open(str(tmp_path))
    refs = ["pets", "pets@experiment", "pets@experiment~1", "pets@gone", "pets@4"]
    assert [repository.resolve("datasets", ref).version for ref in refs] == [3, 2, 1, 3, 4]
    state = repository.state("datasets", "pets")
    assert (state.newest, state.branches, state.removed) == (3, {"experiment": 2, "gone": 3}, {5})
    assert [repository.versions("datasets", "pets").read(number).content["format"] for number in range(1, 6)] == [
        1, 2, 1, 2, 2
    ]  # fmt: skip


def test_a_shard_of_format_1_opens():
    shard = Shard.from_bytes(golden("shard-1.arrow"), "golden")
    assert [shard.sample(row) for row in range(2)] == SAMPLES
    assert [view.tobytes() for view in shard.blobs("image", np.arange(2))] == [each["image"] for each in SAMPLES]


def test_a_shard_of_format_2_opens_with_its_compressed_columns(tmp_path):
    (tmp_path / "shard").write_bytes(golden("shard-2.arrow"))
    assert b"a cat a cat" not in golden("shard-2.arrow")
    shard = Shard.map(tmp_path / "shard")
    assert [shard.sample(row) for row in range(8)] == CAPTIONS
    assert pa.ipc.open_file(golden("shard-2.arrow")).read_all().to_pylist() == CAPTIONS
    # Samples are read one by one from the index and the ranges of their images.
    index = SampleIndex.decode(golden("index-2-compressed.arrow"), "golden")
    part = PartialShard(ObjectInfo(digest_of(golden("shard-2.arrow")), shard._file.mapping.size()), index, "golden")
    assert part.items("caption", np.arange(8)) == [each["caption"] for each in CAPTIONS]
    (read,) = part.plan(np.array([7]))
    part.add(read, [golden("shard-2.arrow")[span.offset :][: span.length] for span in read.spans])
    assert part.sample(7) == CAPTIONS[7]
    assert read.size_bytes == 1 << 14


def test_a_shard_table_of_format_5_is_of_shards_with_compressed_columns():
    found = ShardTable.decode(golden("table-5.arrow"), "golden")
    assert has_compression(found.sample_schema)
    assert found.rows == table().rows


def test_a_shard_table_of_format_1_opens():
    table = ShardTable.decode(golden("table-1.arrow"), "golden")
    assert table.shards() == [SHARD]
    assert (table.num_samples, table.classes) == (2, ("cat", "dög"))
    assert (table.stored_per_shard.tolist(), table.deleted_per_shard.tolist()) == ([2], [0])
    assert (table.index(0), table.deletions, table.objects()) == (None, None, {SHARD.digest})
    assert (dict(table.label_counts), dict(table.image_kinds)) == ({}, {})
    assert [table.largest(name) for name in ("max_width", "max_height", "max_sample_bytes")] == [5, 4, 8]


def test_a_shard_table_of_format_2_opens():
    table = ShardTable.decode(golden("table-2.arrow"), "golden")
    assert table.shards() == [SHARD, SHARD]
    assert (table.num_samples, table.classes) == (3, ("cat", "dög"))
    assert (table.stored_per_shard.tolist(), table.deleted_per_shard.tolist()) == ([2, 2], [0, 1])
    assert (table.index(0), table.index(1), table.deletions) == (Digest("cd" * 32), None, Digest("ef" * 32))
    assert (dict(table.label_counts), dict(table.image_kinds)) == ({0: 1, 1: 1}, {"JPEG": 2})
    assert [table.largest(name) for name in ("max_width", "max_height", "max_sample_bytes")] == [5, 4, 8]


def test_a_shard_table_of_format_3_opens_with_its_weights(tmp_path):
    table = ShardTable.decode(golden("table-3.arrow"), "golden")
    assert table == weighted_table()
    assert (table.view.dataset, str(table.view)) == ("pets@3", "(width > 3); weighted(score)")
    assert (table.weight_per_shard.tolist(), table.samples_per_shard.tolist()) == ([7, 5], [2, 1])
    objects = Repository.create(str(tmp_path / "repo")).objects
    weights = Weights(objects, weighted_table(objects.put(golden("weights-1.arrow")).digest))
    assert [weights.of(shard).tolist() for shard in range(2)] == [[3, 4], [5]]


def test_a_shard_table_of_format_4_opens_with_its_packs(tmp_path):
    table = ShardTable.decode(golden("table-4.arrow"), "golden")
    assert table == packed_table()
    assert (table.num_positions, table.num_samples, table.packs) == (4, 3, table.packing.objects)
    objects = Repository.create(str(tmp_path / "repo")).objects
    stored = WeightPack(0, objects.put(golden("packs-1.arrow")).digest)
    table = table.with_column("samples", [4, 2])  # as many as the packs were made of
    packs = Packs(objects, table, dataclasses.replace(table.packing, objects=(stored,)))
    found = [[values.tolist() for values in packs.of(shard)] for shard in range(2)]
    # Of nine tokens, seven fill a pack, and the last two are in the last one.
    assert found[0] == [[2, 0, 3, 2], [0, 0, 0, 7], [7, 3, 4, 2], [1, 2, 1]]
    assert found[1] == [[0], [0], [5], [1]]


def test_a_shard_table_of_format_6_opens_with_its_groups(tmp_path):
    table = ShardTable.decode(golden("table-6.arrow"), "golden")
    assert table == grouped_table()
    assert (table.grouping.group, table.packs) == (8, table.weights + table.grouping.objects)
    objects = Repository.create(str(tmp_path / "repo")).objects
    stored = Grouping(8, (WeightPack(0, objects.put(golden("aspects-1.arrow")).digest),))
    assert Aspects(objects, table, stored).of(np.array([0, 1, 0]), np.array([1, 0, 0])).tolist() == [112, 128, 138]


def test_a_sample_index_of_format_1_opens():
    """Its digests are a format too: they are compared with those of later samples."""
    index = SampleIndex.decode(golden("index-1.arrow"), "golden")
    assert index.keys == ["cat/1.jpg", "dög/2.jpg"]
    samples, payloads = digest_batch(batch())
    assert [digest.tobytes() for digest in index.digests("sample")] == samples
    assert [digest.tobytes() for digest in index.digests("payload")] == payloads
    assert payloads[0] == xxh3_128(SAMPLES[0]["image"]).digest()
    assert index.layout is None


def test_a_sample_index_of_format_2_says_where_record_batches_lie_and_gives_their_digests():
    found = SampleIndex.decode(golden("index-2.arrow"), "golden")
    assert found.keys == ["cat/1.jpg", "dög/2.jpg"]
    assert [digest.tobytes() for digest in found.digests("sample")] == digest_batch(batch())[0]
    assert found.layout.schema.equals(image_schema(labelled=True), check_metadata=True)
    (only,) = found.layout.batches
    message = golden("shard-1.arrow")[only.message.offset : only.message.offset + only.message.length]
    assert pa.ipc.read_record_batch(pa.py_buffer(message), found.layout.schema).to_pylist() == SAMPLES
    assert (only.num_samples, only.digest, only.frame) == (2, xxh3_128(message).digest(), None)


def test_a_sample_index_of_format_3_hashes_the_integers_that_arrow_stores_with_their_unit():
    found = SampleIndex.decode(golden("index-3.arrow"), "golden")
    assert not found.hashes_text
    values = {
        "day": b"tdate,D:-719163",
        "span": b"tduration,ns:86400000000000",
        "price": b"n2:-150",
        "when": b"ttimestamp,us,Europe/Berlin:253402300800000000",
        "clock": b"ttime,ns:1001",
        "past": b"[" + sized(b"ttimestamp,s,:1"),
    }
    joined = b"".join(sized(name.encode()) + sized(value) for name, value in sorted(values.items()))
    assert found.digests("sample")[0].tobytes() == xxh3_128(joined).digest()
    assert digest_batch(timed_batch().slice(1)) == ([found.digests("sample")[1].tobytes()],) * 2


@pytest.mark.parametrize("name", ["index-2-pandas.arrow", "index-2-python.arrow"])
def test_a_sample_index_of_format_2_hashes_text_which_differs_where_pandas_was_installed(name):
    """Both were written by the release before format 3, with and without pandas."""
    found = SampleIndex.decode(golden(name), "golden")
    assert found.hashes_text
    identities = [identity for row in sample_identities(old_batch(), found) for identity in row]
    assert missing_rows(found, identities).tolist() == []
    assert missing_rows(found, identities[:2]).tolist() == [1]


def test_a_sample_index_of_format_2_holds_all_but_the_blobs_where_these_are_large():
    raw, _ = write_shard(LARGE)
    found = SampleIndex.decode(golden("index-2-frame.arrow"), "golden")
    (only,), (blob,) = found.layout.batches, found.layout.batches[0].blobs
    message = raw[only.message.offset : only.message.offset + only.message.length]
    assert message[blob.offset : blob.offset + blob.length] == LARGE[0]["image"]
    assert only.frame == message[: blob.offset] + message[blob.offset + blob.length :]
    part = PartialShard(ObjectInfo(digest_of(raw), len(raw)), found, "golden")
    assert part.values("label").tolist() == [0]
    (read,) = part.plan(np.arange(1))
    part.add(read, [LARGE[0]["image"]])
    assert part.sample(0) == LARGE[0]


def test_a_sample_index_has_the_digests_of_parts_of_large_blobs_beside_what_earlier_releases_read():
    found, plain = (SampleIndex.decode(golden(f"index-2-{name}.arrow"), "golden") for name in ("parts", "frame"))
    (parts,), blob = found.layout.parts, LARGE[0]["image"]
    assert (parts.sample, parts.part_bytes) == (0, 10_000)
    digests = [xxh3_128_digest(blob[start : start + 10_000]) for start in range(0, len(blob), 10_000)]
    assert parts.digests == b"".join(digests)
    assert (found.table, found.layout.batches, plain.layout.parts) == (plain.table, plain.layout.batches, ())


def test_a_shard_table_of_format_3_opens_with_its_overlays(tmp_path):
    objects = Repository.create(str(tmp_path / "repo")).objects
    for name in ("overlay-1-sparse.arrow", "overlay-1-directory.arrow", "overlay-1-pack.bin"):
        objects.put(golden(name))
    found = ShardTable.decode(golden("table-3-overlays.arrow"), "golden")
    assert found.overlay_numbers.tolist() == [number - 1 for number in range(found.num_shards)]
    (group,) = found.overlays.groups
    assert (group.num_shards, group.names) == (3, {"caption": "text", "unused": None})
    labels, scores = group.columns["label"], group.columns["score"]
    first, second = (found.overlays.shard(objects, number) for number in (0, 1))
    ((rows, values),) = first.read(labels, pa.int32())
    assert (rows.tolist(), values.to_pylist()) == ([1, 2], [7, None])
    ((rows, values),) = second.read(scores, pa.list_(pa.float32(), 2))
    assert (rows, values.to_pylist()) == (None, [[0.5, 1.5], None])
    assert first.read(scores, pa.list_(pa.float32(), 2)) == []


def test_deletions_of_format_1_open():
    found = Deletions.decode(golden("deletions-1.arrow"), "golden")
    assert (found.shards.tolist(), found.samples.tolist()) == ([2, 70], [11, 1])
    assert found.bitmap(2) == bytes([0b00001001, 0b00000010])
    assert found.kept_rows(2).tolist() == [1, 2, 4, 5, 6, 7, 8, 10]


def test_redactions_of_format_1_open():
    entries = golden("redactions-1.json").decode().split("}\n{")
    texts = [("{" * (number > 0)) + text + ("}\n" * (number < 2)) for number, text in enumerate(entries)]
    contents = [decode_log_entry(text.encode(), "golden") for text in texts]
    found = Redactions().extended([Entry(number, content) for number, content in enumerate(contents, 1)])
    shards = [digest_of(bytes([number])) for number in range(6)]
    newest = found.by_shard[shards[0]]
    assert (newest.shard, newest.index, newest.hash_keys) == (ObjectInfo(shards[4], 1100), shards[5], True)
    assert newest.payloads == {1: "0a" * 16, 0: "0b" * 16}
    assert found.retired == set(shards[:3])
    assert (list(found.certificates), found.head) == ([shards[1]], 3)


def test_the_log_of_copies_of_format_1_opens(tmp_path):
    storage = Storage(str(tmp_path))
    for number, text in enumerate(golden("copies-1.json").decode().split("\n}\n")[:2], 1):
        storage.create(f"copies/{number:08d}.json", f"{text}\n}}\n".encode())
    view, *versions = read_copy_log(storage)
    tables = [digest_of(bytes([number])) for number in range(3)]
    assert (view.version, view.samples, view.tables) == ("pets@2[label <> 'cat']", 7, {"train": tables[0]})
    assert (view.kind, view.destination, view.redactions, view.is_export) == ("export", "/data/pets-wds", 0, True)
    assert (view.by, view.created) == ("ann@host", "2026-11-29T16:59:21+00:00")
    assert [(each.version, each.samples, each.redactions) for each in versions] == [
        ("pets@1", 10, 3),
        ("pets@2", 11, 3),
    ]
    assert versions[1].tables == {"train": tables[2], "val": tables[0]}


def test_an_entry_of_the_log_of_redactions_replaces_values_beside_shards():
    texts = golden("redactions-1-overlays.json").decode().split("}\n{")
    contents = [decode_log_entry(text.encode(), "golden") for text in (f"{texts[0]}}}\n", f"{{{texts[1]}")]
    found = Redactions().extended([Entry(number, content) for number, content in enumerate(contents, 1)])
    names = [digest_of(bytes([number])) for number in range(6)]
    assert found.by_overlay == {
        names[0]: ObjectInfo(names[2], 200),
        names[1]: ObjectInfo(names[2], 200),
        names[3]: ObjectInfo(names[4], 100),
    }
    assert found.overlaid == {names[5]: {2: frozenset({"0a" * 16, "0b" * 16})}}
    assert found.retired == {names[0], names[1], names[3]}


def test_values_beside_shards_name_their_shards():
    shards = {number: digest_of(bytes([number])) for number in (0, 3)}
    assert shards_of(read_ipc(golden("overlay-1-sparse-shards.arrow"), "golden").schema) == shards
    (stream,) = streams_of(golden("overlay-1-pack-shards.bin"), "golden")
    assert (stream["value"].to_pylist(), shards_of(stream.schema)) == (["x", None], {3: shards[3]})


def test_a_tensor_table_of_format_1_opens(tmp_path):
    objects = Objects(Storage(str(tmp_path)))
    assert read_table(objects, objects.put(golden("tensors-1.arrow")).digest) == RECORDS_1


def test_a_tensor_table_of_format_2_opens(tmp_path):
    objects = Objects(Storage(str(tmp_path)))
    assert read_table(objects, objects.put(golden("tensors-2.arrow")).digest) == RECORDS


def test_a_pointer_of_format_1_is_followed(tmp_path):
    objects = Objects(Storage(str(tmp_path)))
    for link in CHAIN:
        objects.storage.put_bytes(Objects.path(link.object), bytes(link.object_bytes))
        mark_intact(objects.storage.local_path(Objects.path(link.object)))  # the file's digests are made up
    objects.storage.put_bytes(pointer_path(Digest("02" * 32)), golden("pointer-1.json"))
    assert find_chain(objects, Digest("02" * 32), 16) == CHAIN


def test_planes_and_differences_of_format_1_are_decoded():
    for name, (encoding, words) in PLANES.items():
        found = WORDS.view(np.uint8).copy()
        first = ("planes", golden("planes-1.bin"))
        codec.ChainDecoder().decode([first] if encoding == "planes" else [first, (encoding, golden(name))], found)
        assert found.tobytes() == words.tobytes(), name


def test_a_signal_reads_as_it_was_written(tmp_path):
    """Only reading: the bytes of a Parquet file depend on the release of pyarrow."""
    repository = Repository.create(str(tmp_path))
    repository.storage.create("signals/cnn/20261123-221830-3fa9c1/loss/0.000000.parquet", golden("signal-1.parquet"))
    signal = read_signal(repository, "cnn/20261123-221830-3fa9c1")
    assert [*zip(*map(np.ndarray.tolist, signal[:3]), strict=True)] == [(0, 2, 0.5), (0, 5, 1.5), (1, 0, np.inf)]
    assert (signal.order, signal.data) == ({"version": "ab" * 32, "seed": 1}, ("pets@3/train",))


def test_a_part_of_a_run_log_of_format_1_opens():
    part = decode_part(golden("run-part-1.jsonl"), "golden", RUN_PART.range)
    assert part.head == {**RUN_PART.head, "format": 1}
    assert tuple(part.content.events) == RUN_EVENTS
    assert part.content.num_left_out == 3
    (table,) = part.content.tables
    assert (table.names, table.first.tolist(), table.last.tolist()) == (("loss", "rate"), [1, 3], [2, 3])
    assert (table.counts.tolist(), table.times.tolist()) == ([2, 1], [1.5, 1.75])
    assert (table.mean.tolist(), table.low.tolist()) == ([[2.0, 0.5], [4.0, 0.5]], [[1.0, 0.5], [4.0, 0.5]])


def test_a_state_of_format_1_opens():
    assert unflatten(decode_state(golden("state-1.json"), "golden"), {"w": STATE["w"]}) == STATE


def test_a_state_of_format_1_opens_with_its_types():
    skeleton = decode_state(golden("state-1-types.json"), "golden")
    found = unflatten(skeleton, {"model.w": STATE["w"], "model.tied": STATE["w"]})
    assert repr(found) == repr(TYPED_STATE)
    assert tied_tensors(skeleton) == {"model.tied": "model.w"}
    assert found["pair"] == Pair(1, 0.5)


def test_a_state_of_format_1_opens_with_its_kinds():
    found = unflatten(decode_state(golden("state-1-kinds.json"), "golden"), {})
    assert repr(found) == repr(VALUES_STATE)


def test_a_state_of_format_2_opens():
    skeleton = decode_state(golden("state-2.json"), "golden")
    found = unflatten(skeleton, {f"w.inner.{name}": torch.full((2,), n) for n, name in enumerate("ab")})["w"]
    assert (type(found), found.a.tolist(), found.b.tolist()) == (TwoTensor, [0, 0], [1, 1])


def test_a_loader_state_of_format_1_opens():
    assert OrderState.from_dict(json.loads(golden("loader-state-1.json"))) == LOADER_STATE


@pytest.mark.parametrize("number", [1, 2])
def test_the_state_of_a_mixture_opens_and_names_the_samples_that_were_served(number):
    """The state alone, as a version has it, gives the order of all positions."""
    content = json.loads(golden(f"mixture-state-{number}.json"))
    order, cursor = parse_use(DataUse("a@1, b@1, c@1", "mixture", content["state"]))
    assert cursor == (0, 50)
    located = mix_order(order, [8, 8, 8]).locate(0, np.arange(130))
    assert [f"{a}:{b}:{c}" for a, b, c in zip(*located, strict=True)] == content["served"]


def test_the_digest_is_blake3():
    """The first bytes of the official test vectors: the empty input, and one zero byte."""
    assert digest_of(b"").startswith("af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262")
    assert digest_of(b"\0").startswith("2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213")


def test_the_order_and_the_crops_of_format_1_are_what_they_were():
    """Saved positions mean these samples and these windows, for ever: the order itself is a format."""
    assert json.loads(golden("order-1.json")) == orders()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        base = WORDS.view(np.uint8)
        compressed = {
            name: codec.encode(words.view(np.uint8), 4, encoding, base) for name, (encoding, words) in PLANES.items()
        }
        for file, content in (written(Path(made)) | compressed).items():
            if not (GOLDEN / file).exists():
                (GOLDEN / file).write_bytes(content)

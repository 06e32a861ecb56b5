"""A program that reads shards, sample indexes and shard tables with random changes, with little memory left.

The digests are those of the changed bytes, so that nothing but the checks of the readers stands before them. Only our
errors may come, and what is read must not depend on how it is read. The last line is what became of the inputs.
"""

import json
import os
import random
import re
import resource
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from datasvc.errors import DatasvcError
from datasvc.repository import Repository
from datasvc.shards import Shard, open_dataset
from datasvc.shards.format import compressed_batches, writer
from datasvc.shards.format.partial_reader import PartialShard
from datasvc.shards.format.salvage import readable_identities
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import is_blob, shard_schema, with_compression
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.verify import verify
from tests.shards.written_versions import write_version

MAX_BYTES = 512 << 20
NUM_CHANGED = 300
SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("label", pa.int32()),
        pa.field("caption", pa.string()),
        pa.field("boxes", pa.list_(pa.list_(pa.float32(), 4))),
        pa.field("meta", pa.struct([("good", pa.bool_()), ("tags", pa.map_(pa.string(), pa.int16()))])),
        pa.field("name", pa.large_string()),
    ]
)


def sample(number):
    return {
        "key": f"k{number:03}",
        "image": None if number % 7 == 3 else bytes([number]) * 15_000,
        "label": number,
        "caption": None if number % 5 == 1 else "é" * number,
        "boxes": [[float(number)] * 4] * (number % 3),
        "meta": {"good": number % 2 == 0, "tags": [(f"t{tag}", tag) for tag in range(number % 4)]},
        "name": f"name {number}",
    }


def changed(rng, whole):
    """Return the bytes with one to three changes, which favour the places where positions and sizes are."""
    content = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 3])):
        place = rng.randrange(len(content))
        if rng.randrange(4):  # the footer, or the start of a message and its first buffers
            starts = [match.start() for match in re.finditer(b"\xff\xff\xff\xff", content)]
            start = rng.choice([*starts, len(content) - 1500])
            place = min(max(0, start) + rng.randrange(1500), len(content) - 1)
        how = rng.randrange(5)
        if how == 0:
            content[place] ^= 1 << rng.randrange(8)
        elif how == 1:
            content[place : place + 8] = rng.randbytes(8)
        elif how == 2:
            number = rng.choice([0, 1, -1, 2**20, 2**31 - 8, 2**31, 2**40, 2**62, -(2**31)])
            content[place & ~7 : (place & ~7) + 8] = number.to_bytes(8, "little", signed=True)
        elif how == 3:
            number = rng.choice([0, 1, 2**16, 2**31 - 8, 2**32 - 1])
            content[place & ~3 : (place & ~3) + 4] = number.to_bytes(4, "little")
        else:
            del content[place : place + rng.choice([1, 8, 64, 4096])]
    return bytes(content)


def read_all(shard):
    """Return all that a shard can be asked for."""
    rows = np.arange(shard.num_samples)
    read = [shard.sample(row) for row in rows.tolist()]
    for field in shard.schema:
        read.append(shard.is_valid(field.name, rows))
        read.append(shard.column(field.name).to_pylist())
        if is_blob(field.type):
            views = shard.blobs(field.name, rows)
            read.append([shard.read(view, np.empty(len(view), np.uint8)).tobytes() for view in views])
        elif field.type == pa.int32():
            read.append(shard.values(field.name).tolist())
    return read


def read_shard(content, path):
    """Read a shard in memory, mapped, and the rest of it as `verify` does."""
    readable_identities(pa.py_buffer(content), None)
    path.write_bytes(content)
    in_memory = read_all(Shard.from_bytes(content, "shard"))
    assert repr(read_all(Shard.map(path))) == repr(in_memory)


class OneShard:
    """Ranges of a shard."""

    def __init__(self, content):
        self._content = content

    def read_range(self, _digest, offset, length):
        return self._content[offset : offset + length].ljust(length, b"\0")


def read_index(content, info, shard):
    index = SampleIndex.decode(content, "index")
    index.digests("sample").tolist(), index.digests("payload").tolist(), index.keys
    if index.layout is None:
        return
    partial = PartialShard(info, index, "shard")
    for row in range(partial.num_samples):
        partial.fetch(OneShard(shard), np.array([row]))
    read_all(partial)


def read_shard_table(content):
    table = ShardTable.decode(content, "table")
    table.objects(), table.shards(), table.num_samples, table.size_bytes, table.samples_per_shard
    [table.index(number) for number in range(table.num_shards)]
    ShardTable.decode(table.encode(), "again")


def commit(repository, table):
    entry = {
        "splits": {"train": {"table": table, "samples": 40, "bytes": 1, "shards": 1}},
        "message": "",
        "skipped": 0,
    }
    path = repository.storage.local_path("datasets/pets/versions")
    for version in Path(path).glob("00000002*"):
        version.unlink()
    repository.versions("datasets", "pets").append(lambda _head: entry)


def verify_shard(repository, table, content):
    """A plain `verify` must name each shard that cannot be read."""
    stored = repository.objects.put(content)
    rows = table.rows
    for name, value in (("digest", bytes.fromhex(stored.digest)), ("bytes", stored.size_bytes)):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(name), pa.array([value], rows.schema.field(name).type))
    changed_table = type(table)(rows, table.sample_schema, table.classes, table.label_counts)
    commit(repository, repository.objects.put(changed_table.encode()).digest)
    is_bad = any(problem.role == "shard" for problem in verify(repository, "pets@2").problems)
    try:
        list(open_dataset(repository, "pets@2")["train"])
    except DatasvcError:
        assert is_bad
    else:
        assert not is_bad


def attempt(seen, kind, read, *arguments):
    try:
        read(*arguments)
        seen[f"{kind} read"] += 1
    except DatasvcError:
        seen[f"{kind} refused"] += 1


def main():
    folder = Path(sys.argv[1])
    rng = random.Random(int(sys.argv[2]))
    writer.BATCH_SAMPLES = 9  # several record batches
    compressed_batches._MIN_RATIO = 0
    schema = with_compression(SCHEMA, compressed=sys.argv[3] == "compressed")
    repository = Repository.create(str(folder / "repository"))
    write_version(repository, "pets", {"train": [[sample(number) for number in range(40)]]}, schema)
    table = open_dataset(repository, "pets")["train"].table
    info = table.shard(0)
    shard, index = (repository.objects.read(digest) for digest in (info.digest, table.index(0)))
    encoded = table.encode()
    path = folder / "shard"
    read_shard(shard, path)
    read_index(index, info, shard)
    read_shard_table(encoded)
    verify_shard(repository, table, shard)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_BYTES,) * 2)
    seen = Counter()
    for number in range(NUM_CHANGED):
        inputs = {"shard": changed(rng, shard), "index": changed(rng, index), "table": changed(rng, encoded)}
        # What ends the process is in these files afterwards.
        for kind, content in inputs.items():
            (folder / f"last.{kind}").write_bytes(content)
        attempt(seen, "shard", read_shard, inputs["shard"], path)
        attempt(seen, "index", read_index, inputs["index"], info, shard)
        attempt(seen, "table", read_shard_table, inputs["table"])
        if number % 10 == 0:
            attempt(seen, "version", verify_shard, repository, table, inputs["shard"])
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()

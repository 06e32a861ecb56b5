"""A program that reads checkpoints which somebody hostile wrote, with little memory left and every way out watched.

Everything here has the digests and checksums that it should have: only what it says is wrong.
"""

import codecs
import json
import os
import random
import resource
import sys
import threading
from dataclasses import replace

from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from datasvc.errors import DatasvcError
from datasvc.models import describe_model, restore
from datasvc.models.dcp import DcpReader
from datasvc.models.dcp.metadata import describe_unsharded, encode_sharding
from datasvc.models.registry.verify import verify
from datasvc.models.tensors.state_tree import decode_state, encode_state
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, decode_table, encode_table
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.log import encode_entry
from datasvc.repository.objects.objects import digest_of
from tests.models.every_kind import save_every_kind

MAX_BYTES = 1 << 30
WORDS = [
    "$tensor",
    "$tuple",
    "$dict",
    "$float",
    "$bytes",
    "$unknown",
    "$typed",
    "counter",
    "subclass",
    "$tied",
    "model.noise",
    "nan",
    "00",
    "a",
    "../../etc/passwd",
]
FORBIDDEN = {"exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect",
             "pickle.find_class", "ctypes.dlopen", "import"}  # fmt: skip

watching = threading.Event()
root = sys.argv[1]


def watch(event, arguments):
    if not watching.is_set():
        return
    if event in FORBIDDEN:
        os.write(2, f"forbidden: {event} {arguments}\n".encode())
        os._exit(42)
    if (
        event == "open"
        and isinstance(arguments[0], str)
        and not arguments[0].startswith((root, "/dev/null", "/sys/fs/cgroup", "/proc/self"))
    ):
        os.write(2, f"it opened {arguments}\n".encode())
        os._exit(43)


def commit(repository, **changes):
    """Write version 3 of the model, its entry that of version 2 with changes, whatever stood there before."""
    content = {**describe_model(repository, "m@2").entry, **changes}
    content.pop("format", None)
    path = repository.storage.local_path("models/m/versions/00000003.json")
    path.write_bytes(encode_entry({"format": 1, **content}))


def put(repository, raw):
    """Store an object under its right digest, with no care for power cuts."""
    digest = digest_of(raw)
    repository.storage.put_bytes(repository.objects.path(digest), raw, synced=False)
    return digest


def try_all(repository, seen):
    """Restore and verify version 3; only our errors may come."""
    watching.set()
    try:
        for use in (
            lambda: restore(repository, "m@3"),
            lambda: verify(repository, [Resolved("models", "m", 3)], deep=True),
        ):
            try:
                use()
                seen["fine"] = seen.get("fine", 0) + 1
            except DatasvcError as error:
                seen[type(error).__name__] = seen.get(type(error).__name__, 0) + 1
    finally:
        watching.clear()


def try_to_plan(repository, seen):
    """Have torch plan a load of version 3; it may refuse too, but build nothing that is not stored."""
    watching.set()
    try:
        metadata = DcpReader(repository.url, ref="m@3").read_metadata()
        _EmptyStateDictLoadPlanner().set_up_planner({}, metadata, is_coordinator=True)
        seen["fine"] = seen.get("fine", 0) + 1
    except (DatasvcError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        seen[type(error).__name__] = seen.get(type(error).__name__, 0) + 1
    finally:
        watching.clear()


def random_value(rng, depth=0):
    kind = rng.randrange(9 if depth < 5 else 6)
    if kind == 0:
        return rng.choice([None, True, 0, -1, 2**70, 1e300, 10**400])
    if kind <= 2:
        return rng.choice(WORDS)
    if kind == 3:
        return {rng.choice(WORDS[:6]): rng.choice(WORDS)}
    if kind == 4:
        return {"$tensor": rng.choice(["model.noise", "model.bias0", "gone"])}
    if kind == 5:
        return "x" * rng.randrange(100)
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(WORDS): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return {rng.choice(WORDS[:5]): random_value(rng, depth + 1)}


def raw_state(tree, types):
    """Return the bytes of a state; `encode_state` takes valid skeletons only."""
    return json.dumps({"format": 1, "state": tree, "types": types}, default=str).encode()


def hostile_states(rng):
    """Yield the bytes of states."""
    yield b"[" * 200_000
    yield b'{"format": 1, "state": ' + b'{"a": ' * 3000 + b"1" + b"}" * 3001
    yield b'{"format": 1, "state": ' + b"9" * 100_000 + b"}"
    yield b'{"format": "\xff", "state": 1}'
    yield encode_state({"$tuple": [{"$tensor": "model.noise"}] * 10_000})
    tree = {"model": {"a": {"$tensor": "model.noise"}}, "t": {"$tuple": [1, {"$float": "nan"}]}}
    for module, name in (("subprocess", "Popen"), ("antigravity", "x"), ("os", "system"), ("time", "struct_time")):
        yield raw_state(tree, [[["t"], "named", module, name, ["a", "b"]]])
    yield raw_state(tree, [[["t"], "named", "x", "X", ["a", "__import__('os').system('true')"]]])
    for _ in range(70):
        yield raw_state(random_value(rng), [])
    for _ in range(40):
        kind = rng.choice(["ordered", "named", "tied", "later"])
        path = rng.choice([[], ["t"], ["t", 0], ["model", "a"], ["model", -1], random_value(rng)])
        details = [random_value(rng) for _ in range(rng.randrange(4))]
        yield raw_state(tree, rng.choice([[[path, kind, *details]], random_value(rng)]))
    whole = raw_state(tree, [[["model"], "ordered"], [["t"], "named", "a", "B", ["x", "y"]]])
    for _ in range(40):
        yield bytes(mutate(rng, whole))


def hostile_shardings(rng, whole):
    """Yield the bytes of shardings: places in lists that are nowhere, then mutated ones."""
    described = json.loads(whole)
    for path in (["a", 20_000_000], ["model", "weight", 20_000_000], [2**70], [-1], [True], [], "model", None):
        key = rng.choice([*described["tensors"], "step"])
        paths = {**described["planner_data"], key: {"$tuple": path} if isinstance(path, list) else path}
        yield json.dumps({**described, "planner_data": paths}).encode()
    for _ in range(60):
        yield json.dumps({**described, rng.choice([*described]): random_value(rng)}).encode()
    for _ in range(60):
        yield bytes(mutate(rng, whole))


def hostile_tables(rng, whole):
    """Yield the bytes of tables: some that claim more than any machine has, then mutated ones."""
    largest = max(decode_table(whole, "here"), key=lambda record: record.nbytes)
    (link, *_) = largest.chunks[0].chain
    for size, count in ((1 << 40, 1), (1 << 50, 1), (60 << 20, 200)):
        for encoding in ("raw", "planes"):
            length = size if encoding == "raw" else link.length
            claim = replace(link, object_bytes=length, offset=0, length=length, encoding=encoding)
            chunk = Chunk((0,), (size,), largest.chunks[0].digest, (claim,))
            yield encode_table(TensorRecord(f"t{number:03}", "uint8", (size,), (chunk,)) for number in range(count))
    for _ in range(100):
        yield bytes(mutate(rng, whole))


def mutate(rng, whole):
    content = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(len(content))
        how = rng.randrange(4)
        if how == 0:
            content[place] ^= 1 << rng.randrange(8)
        elif how == 1:
            content[place : place + 8] = rng.randbytes(8)
        elif how == 2:
            # Large numbers, where sizes, offsets and counts are.
            content[place & ~7 : (place & ~7) + 8] = rng.choice([2**40, 2**62, -1, 2**31]).to_bytes(
                8, "little", signed=True
            )
        else:
            del content[place : place + rng.randrange(1, 64)]
    return content


def main():
    rng = random.Random(5)
    for name in ("utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be", "utf-32-le"):
        codecs.lookup(name)  # json guesses among these and loads them at their first use
    repository = Repository.open(root)
    save_every_kind(repository)
    entry = describe_model(repository, "m@2").entry
    table = repository.objects.read(entry["tensors"])
    records = {record.name: record for record in decode_table(table, "here")}
    skeleton = decode_state(repository.objects.read(entry["state"]), "m@2")
    sharding = encode_sharding(describe_unsharded(skeleton, records, "m@2").metadata, (), "id")
    commit(repository, sharding=put(repository, sharding))
    try_to_plan(repository, {})
    restore(repository, "m@2")
    verify(repository, [Resolved("models", "m", number) for number in (2, 3)], deep=True)
    in_use = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_BYTES,) * 2)
    sys.addaudithook(watch)
    seen = {"entries": {}, "states": {}, "tables": {}, "shardings": {}, "plans": {}}
    for raw in hostile_shardings(rng, sharding):
        commit(repository, sharding=put(repository, raw))
        try_all(repository, seen["shardings"])
        try_to_plan(repository, seen["plans"])
    for raw in hostile_states(rng):
        commit(repository, state=put(repository, raw))
        try_all(repository, seen["states"])
    for raw in hostile_tables(rng, table):
        commit(repository, tensors=put(repository, raw))
        try_all(repository, seen["tables"])
    for _ in range(40):
        name = rng.choice(["tensors", "state", "code", "data", "metrics", "bytes", "parent", "config", "sharding"])
        value = random_value(rng)
        commit(repository, **{name: value if value != 10**400 else 0})
        try_all(repository, seen["entries"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sys.stdout.write(json.dumps({"seen": seen, "peak_bytes": peak}))


if __name__ == "__main__":
    main()

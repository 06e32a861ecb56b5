"""What acts on data sets and models cost as these grow: samples, versions of a data set, versions of models."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasvc
from datasvc.api import DataRepository
from datasvc.repository import Repository
from datasvc.repository.logs.log import Log, encode_entry
from tools.bench.fresh import peak_bytes
from tools.bench.large_versions import INDEXED_PER_SHARD, key_of, write_indexed
from tools.bench.models_find import describe
from tools.bench.photos import write_photos
from tools.bench.runner import Options, Report, bench, call_apart, column, run_rounds, timed

ADDED = 8  # photos of an append
NAMES = 100  # of models
Acts = dict[str, Callable[[DataRepository], object]]


@bench(
    repeats=3,
    shards={"type": int, "nargs": "+", "default": [200, 2000, 20_000], "help": f"of {INDEXED_PER_SHARD} samples"},
    versions={"type": int, "nargs": "+", "default": [100, 1000, 10_000], "help": "of a data set of 26 samples"},
    models={"type": int, "nargs": "+", "default": [1000, 10_000, 100_000], "help": f"versions of {NAMES} models"},
)
def metadata(options: Options) -> Iterator[Report]:
    """How long the acts on a repository take as it grows: seconds of each act, in a fresh process of all of them.

    Three repositories grow. The first has a data set of more and more samples; the sample indexes are there, the
    images are not. The second has a data set with more and more versions. The third has more and more versions of
    models. Ratios say how much longer an act takes with ten times as much: 1 does not grow, 10 is linear.
    """
    kinds: list[tuple[str, Sequence[int], Callable[[Path, int], str]]] = [
        ("samples", options.shards, make_samples),
        ("versions", options.versions, make_versions),
        ("models", options.models, make_models),
    ]
    for kind, sizes, make in kinds:
        urls = {size: make(options.folder / f"{kind}-{size}", size) for size in sizes}
        first = make(options.folder / f"{kind}-first", sizes[0])
        arms = {f"{size}": partial(call_apart, act, kind, first, urls[size]) for size in sizes}
        found = run_rounds(arms, options.repeats)
        report = Report(f"Acts on a repository by its number of {'shards' if kind == 'samples' else kind}")
        for name in found[f"{sizes[0]}"][0]:
            unit = "MB" if name == "peak memory" else "ms"
            for size in found:
                report.add_row(f"{name}, {int(size):,}", unit, column(found[size], name))
            for small, large in itertools.pairwise(sizes):
                report.add_ratio(
                    f"{name}, {large:,} / {small:,}", column(found[f"{large}"], name), column(found[f"{small}"], name)
                )
        yield report


def make_samples(folder: Path, num_shards: int) -> str:
    """Write a data set `photos` of `num_shards` shards, a version with one sample less, and photos to append."""
    data = datasvc.open(str(folder / "repo"), create=True)
    write_indexed(data.repository, num_shards)
    data.datasets.delete("photos@1", keys=[key_of(0)])
    write_photos(folder / "photos", num_images=ADDED)
    return data.repository.url


def make_versions(folder: Path, num_versions: int) -> str:
    """Write a data set `photos` whose versions differ in their messages."""
    data = datasvc.open(str(folder / "repo"), create=True)
    write_photos(folder / "photos", num_images=ADDED)
    data.datasets.ingest(str(folder / "photos"), "photos")
    log = data.repository.versions("datasets", "photos")
    entry = dict(log.read(1).content)
    for number in range(2, num_versions + 1):
        _write_entry(data.repository, log, number, entry | {"message": f"version {number}"})
    return data.repository.url


def make_models(folder: Path, num_versions: int) -> str:
    """Write versions of 100 models as runs leave them."""
    import random

    data = datasvc.open(str(folder / "repo"), create=True)
    draw = random.Random(0)  # noqa: S311 - no secrets
    data.models.save("net0", {"model": {}}, step=0)
    content = data.repository.versions("models", "net0").read(1).content
    stored = {key: content[key] for key in ("tensors", "state", "num_tensors", "bytes")}
    for name in range(NAMES):
        log = data.repository.versions("models", f"net{name}")
        for number in range(1 + (name == 0), num_versions // NAMES + 1):
            entry = describe(number, draw) | stored | {"data": [], "parent": f"net{name}@{number - 1}"}
            _write_entry(data.repository, log, number, entry | ({"parent": None} if number == 1 else {}))
    return data.repository.url


def _write_entry(repository: Repository, log: Log, number: int, entry: dict[str, Any]) -> None:
    """Write an entry unsynced, which only makes the writing faster."""
    path = repository.storage.local_path(log.path_of(number))
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_entry({**entry, "commit": f"{number:032x}"}))


def act(kind: str, first: str, url: str) -> None:
    """Print the milliseconds of each act on a repository, and the peak memory of this process in MB.

    All acts are made on the repository `first` before, since some import modules.
    """
    found: dict[str, float] = {}
    for place in (first, url):
        acts = {"samples": _on_samples, "versions": _on_versions, "models": _on_models}[kind]()
        for name, each in acts.items():
            data = datasvc.open(place)
            found[name] = 1e3 * timed(partial(each, data))
    print(json.dumps(found | {"peak memory": peak_bytes() / 1e6}))


def _on_samples() -> Acts:
    name = f"t{time.time_ns()}"  # new in each round
    return {
        "open": lambda data: len(data.dataset("photos@2")["train"]),
        "show": lambda data: data.datasets.describe("photos@2"),
        "diff of two versions": lambda data: data.datasets.diff("photos@1", "photos@2"),
        "branch": lambda data: data.datasets.branch("photos@2", f"b{name}"),
        "append to the branch": lambda data: data.datasets.ingest(
            str(Path(data.repository.url).parent / "photos"), f"photos@b{name}", append=True, shard_bytes=1 << 20
        ),
        "delete of a sample": lambda data: data.datasets.delete(f"photos@b{name}", keys=[key_of(1)]),
        "tag": lambda data: data.datasets.tag("photos@2", name),
        "gc": lambda data: data.gc(dry_run=True),
    }


def _on_versions() -> Acts:
    name = f"t{time.time_ns()}"  # new in each round
    return {
        "open the newest": lambda data: data.dataset("photos"),
        "show": lambda data: data.datasets.describe("photos"),
        "diff with the first": lambda data: data.datasets.diff("photos@1", "photos"),
        "log of the last ten": lambda data: data.datasets.log("photos", last=10),
        "ls": lambda data: data.datasets.ls(),
        "tag": lambda data: data.datasets.tag("photos", name),
        "open by a tag": lambda data: data.dataset(f"photos@{name}"),
        "branch": lambda data: data.datasets.branch("photos", f"b{name}"),
        "gc": lambda data: data.gc(dry_run=True),
    }


def _on_models() -> Acts:
    name = f"t{time.time_ns()}"  # new in each round
    return {
        "show": lambda data: data.models.describe("net7"),
        "log of the last ten": lambda data: data.models.log("net7", last=10),
        "tag": lambda data: data.models.tag("net7", name),
        "save of a new model": lambda data: data.models.save(name, {"model": {}}, step=1),
        "ls": lambda data: data.models.ls(),
        "find": lambda data: data.models.find("metrics.top1 > 0.99"),
        "find again": lambda data: data.models.find("metrics.top1 > 0.99"),
        "diff": lambda data: data.models.diff("net7@1", "net7@2"),
        "gc": lambda data: data.gc(dry_run=True),
    }

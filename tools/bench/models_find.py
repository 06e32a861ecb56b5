"""Searches over very many versions of a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasvc.models import model_log
from datasvc.models.search import find_versions
from datasvc.models.search.index import INDEX_PATH
from datasvc.repository import Repository
from datasvc.repository.logs.log import encode_entry
from tools.bench.runner import Options, Report, bench, run_rounds, timed

CONDITION = "metrics.top1 > 0.75 and 'imagenet@3' in data"
WITH_TAG = f"{CONDITION} and 'prod' in tags"


def write_versions(repository: Repository, numbers: range) -> None:
    """Write entries as a run leaves them; unsynced, which only makes the writing faster."""
    draw = random.Random(numbers.start)  # noqa: S311 - no secrets
    log = repository.versions("models", "resnet")
    for number in numbers:
        path = repository.storage.local_path(log.path_of(number))
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_entry(describe(number, draw)))


def describe(number: int, draw: random.Random) -> dict[str, Any]:
    """Return an entry."""
    metrics = {f"{split}_{name}": draw.random() for split in ("train", "val") for name in ("loss", "top5")}
    settings = {f"setting_{place}": draw.choice([0.1, "cosine", True, 256]) for place in range(24)}
    return {
        "format": 1,
        "commit": f"{number:032x}",
        "created": f"2026-01-{number % 28 + 1:02}T00:00:00+00:00",
        "step": number * 500,
        "tensors": "0" * 64,
        "state": "0" * 64,
        "num_tensors": 320,
        "bytes": 200_000_000,
        "data": [
            {
                "dataset": f"imagenet@{number % 5 + 1}",
                "split": "train",
                "state": {"epoch": number // 100, "position": 7},
            }
        ],
        "code": {"revision": f"{number // 200:040x}", "dirty": False},
        "config": {**settings, "optimizer": {"name": "adamw", "lr": draw.choice([1e-3, 3e-4]), "betas": [0.9, 0.95]}},
        "metrics": {**metrics, "top1": draw.random(), "loss": draw.random()},
        "parent": f"resnet@{number - 1}" if number > 1 else None,
        "message": "",
    }


@bench(repeats=9, versions=10_000, behind=(100, "newer than the index"))
def models_find(options: Options) -> Report:
    """How long `datasvc models find` takes over very many versions, against reading the entry of every one.

    The entries are those of a long training run: some 30 settings and 6 metrics each, several data sets, two models.
    What is timed is the whole question, from opening the repository to the versions found. Lower is better; the ratio
    says how many times longer it takes to read all entries.
    """
    url = str(options.folder / "repository")
    repository = Repository.create(url)
    write_versions(repository, range(1, options.versions + 1))
    repository.tag("models", "resnet@3", "prod")
    index = Path(url, INDEX_PATH)
    newer = range(options.versions + 1, options.versions + options.behind + 1)

    def find(condition: str = CONDITION) -> float:
        return timed(lambda: find_versions(Repository.open(url), condition))

    def find_without_index() -> float:
        index.unlink()
        return find()

    def find_behind() -> float:
        # The index keeps standing where it is: fewer versions are behind it than make it worth writing.
        write_versions(repository, newer)
        seconds = find()
        for number in newer:
            Path(url, repository.versions("models", "resnet").path_of(number)).unlink()
        return seconds

    fresh, read = "find", "read every entry"
    find()
    arms = {
        fresh: find,
        "find by tag too": lambda: find(WITH_TAG),
        f"find, {options.behind} versions behind": find_behind,
        "find, and make the index": find_without_index,
        read: lambda: timed(lambda: model_log(Repository.open(url), "resnet")),
    }
    seconds = run_rounds(arms, options.repeats)
    report = Report(
        f"Versions that meet {CONDITION!r}, of {options.versions:,}",
        f"The index takes {index.stat().st_size / 1e6:.1f} MB.",
    )
    report.add_rows("ms", seconds, lambda value: 1e3 * value)
    report.add_ratio(f"{read} / {fresh}", seconds[read], seconds[fresh])
    return report

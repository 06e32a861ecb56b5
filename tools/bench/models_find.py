"""How long `datasvc models find` takes over very many versions, against reading the entry of every one.

The entries are those of a long training run: some 30 settings and 6 metrics each, several data sets, two models. What
is timed is the whole question, from opening the repository to the versions found. Lower is better; the ratio says how
many times longer it takes to read all entries.

    python tools/bench/models_find.py [--repeats 9] [--versions 10000] [--behind 100] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report, alternate, make_parser

from datasvc.models import model_log
from datasvc.models.search import find_versions
from datasvc.models.search.index import INDEX_PATH
from datasvc.repository import Repository
from datasvc.repository.logs.log import encode_entry

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


def timed_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds that `work` takes."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=9)
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--behind", type=int, default=100, help="newer than the index; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        url = f"{name}/repository"
        repository = Repository.create(url)
        write_versions(repository, range(1, arguments.versions + 1))
        repository.tag("models", "resnet@3", "prod")
        index = Path(url, INDEX_PATH)

        def find(condition: str) -> None:
            find_versions(Repository.open(url), condition)

        def find_anew() -> None:
            index.unlink()
            find(CONDITION)

        def find_behind() -> float:
            # The index keeps standing where it is: fewer versions are behind it than make it worth writing.
            write_versions(repository, range(arguments.versions + 1, arguments.versions + arguments.behind + 1))
            found = timed_ms(lambda: find(CONDITION))
            for number in range(arguments.versions + 1, arguments.versions + arguments.behind + 1):
                Path(url, repository.versions("models", "resnet").path_of(number)).unlink()
            return found

        find(CONDITION)
        fresh, tagged, behind = "find", "find by tag too", f"find, {arguments.behind} versions behind"
        made, read = "find, and make the index", "read every entry"
        times = alternate(
            {
                fresh: lambda: timed_ms(lambda: find(CONDITION)),
                tagged: lambda: timed_ms(lambda: find(WITH_TAG)),
                behind: find_behind,
                made: lambda: timed_ms(find_anew),
                read: lambda: timed_ms(lambda: model_log(Repository.open(url), "resnet")),
            },
            arguments.repeats,
        )
        size_bytes = index.stat().st_size
    report = Report(
        f"Versions that meet {CONDITION!r}, of {arguments.versions:,}",
        f"The index takes {size_bytes / 1e6:.1f} MB.",
    )
    for contestant, values in times.items():
        report.add_row(contestant, "ms", values)
    report.add_ratio(f"{read} / {fresh}", times[read], times[fresh])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()

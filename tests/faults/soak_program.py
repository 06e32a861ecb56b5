"""One process of the soak of a repository (test_repository_soak.py): it does its work over and over until SIGTERM.

Arguments: the repository, a folder for its own files, and the work, a name in `WORK`. It keeps a book, a file of JSON
lines: the line "begun" before a piece of work and "done" after it.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import datasvc
from datasvc.api.gc import MIN_GRACE_S, gc_at
from datasvc.cache import Cache
from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.loaders import ImageLoader
from datasvc.models import RetentionPolicy
from datasvc.testing import encode_jpeg

torch.set_num_threads(1)
DATA, MODEL = "pets", "net"
KEPT_VERSIONS = 3
# Objects of this age may be deleted while others write; each piece of work here takes a few seconds at most.
GRACE_S = 20
IMAGES_PER_INGEST = 12


def state_of(step):
    """Return the state that is saved for a step: two tensors that change, and one that does not."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(60_000, generator=generator),
        "bias": torch.randn(100, generator=generator),
        "frozen": torch.full((30_000,), 7.0),
        "step": step,
    }


def is_state(state):
    expected = state_of(state["step"])
    return all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)) for name, value in expected.items())


def image_of(number):
    return encode_jpeg(24, 24, seed=number)


class Book:
    """What was begun and done, for the comparison at the end. The file is only appended to."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, what, **facts):
        os.write(self._file, json.dumps({"what": what, **facts}).encode() + b"\n")


class Worker:
    """The repository, the folder of this process, its book, and whether it was told to stop."""

    def __init__(self, url, folder):
        self.repo = datasvc.open(url)
        self.folder = folder
        self.book = Book(folder / "book")
        # What one process does next depends on how often it was started.
        self.number = sum(1 for _ in (folder / "book").open()) * 1000 + 1
        self.is_told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number, _frame):
        self.is_told = True

    def next_number(self):
        self.number += 1
        return self.number


def save(worker):
    step = worker.next_number()
    worker.book.write("begun", step=step)
    version = worker.repo.models.save(MODEL, state_of(step), step=step, codec="delta" if step % 3 else "none")
    worker.book.write("done", step=step, version=version.version)
    if step % 4 == 0:
        worker.repo.models.retain(MODEL, RetentionPolicy(last=KEPT_VERSIONS), dry_run=False)


def ingest(worker):
    first = worker.next_number() * 100
    numbers = list(range(first, first + IMAGES_PER_INGEST))
    folder = worker.folder / f"images-{first}"
    for number in numbers:
        path = folder / "train" / f"class{number % 3}" / f"{number:09d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_of(number))
    worker.book.write("begun", numbers=numbers)
    worker.repo.datasets.ingest(str(folder), DATA, append=True, shard_bytes=3000)
    worker.book.write("done", numbers=numbers)


def delete(worker):
    split = worker.repo.dataset(DATA)["train"]
    keys = sorted(sample["key"] for sample in split)
    chosen = keys[worker.next_number() % max(1, len(keys) - 5) :][:3] if len(keys) > 10 * IMAGES_PER_INGEST else []
    if chosen:
        worker.book.write("begun", keys=chosen)
        condition = "key in ({})".format(", ".join(f"'{key}'" for key in chosen))
        worker.repo.datasets.delete(DATA, where=condition)
        worker.book.write("done", keys=chosen)


def sweep(worker):
    # `gc` itself refuses so short a grace while others write.
    repository = worker.repo.repository
    report = gc_at(repository, repository.storage.now_s(), grace_s=GRACE_S, dry_run=False)
    worker.book.write("done", objects=len(report.objects))


def collect(worker):
    """Run gc as it is meant: it is refused if the clock of this process is wrong, and finds nothing old otherwise."""
    try:
        report = worker.repo.gc(grace_s=MIN_GRACE_S, dry_run=False)
    except ConfigError as error:
        if "the clock of this machine shows" not in str(error):
            raise
    else:
        assert not report.objects
    worker.book.write("done")


def train(worker):
    """Read the newest data set once through a cache and a loader, and restore the newest model."""
    version = worker.repo.datasets.resolve(DATA)
    split = worker.repo.dataset(str(version))["train"]
    expected = sorted(sample["key"] for sample in split)
    with (
        Cache(worker.folder / "cache", budget="20MB") as cache,
        ImageLoader(
            split, batch_size=16, training=False, size=16, columns=["key"], cache=cache, seed=worker.number
        ) as loader,
    ):
        keys = sorted(
            key
            for batch in loader
            for key, is_sample in zip(batch.columns["key"], batch.mask.tolist(), strict=True)
            if is_sample
        )
    assert keys == expected, (str(version), len(keys), len(expected))
    found = worker.repo.models.restore(MODEL).state
    assert is_state(found), found["step"]
    worker.book.write("done", version=str(version), samples=len(keys), step=found["step"])


WORK = {"save": save, "ingest": ingest, "delete": delete, "sweep": sweep, "collect": collect, "train": train}
# A name that does not exist yet, or a version that retention removes while it is read.
ALLOWED = {"ingest": (ConflictError,), "delete": (ConflictError, NotFoundError), "train": (NotFoundError,)}


def main():
    url, folder, work = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    worker = Worker(url, folder)
    while not worker.is_told:
        try:
            WORK[work](worker)
        except ALLOWED.get(work, ()) as error:
            worker.book.write("refused", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

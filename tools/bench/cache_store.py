"""What the measurements of the cache read from: a repository of photos behind an HTTP origin of chosen speed."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from datasvc.repository import ObjectInfo, Objects, Repository
from datasvc.shards import Split, ingest, open_dataset
from tools.bench.origin import Limits, OriginProcess

NAME = "photos"


class Store:
    """A local repository, and the way to it over HTTP.

    Args:
        repository: on this machine.
        folder: on the disk that is measured; every run gets a new folder in it.
    """

    def __init__(self, repository: Repository, folder: Path) -> None:
        self.repository = repository
        self._folder = folder

    @classmethod
    def of_photos(cls, photos: Path, folder: Path, *, shard_bytes: int) -> Self:
        """Ingest the photos into a new repository."""
        store = cls(Repository.create(tempfile.mkdtemp(dir=folder, prefix="repository-")), folder)
        ingest(store.repository, str(photos), NAME, shard_bytes=shard_bytes)
        return store

    @property
    def split(self) -> Split:
        """The photos, read in place."""
        return open_photos(self.repository)

    @contextmanager
    def origin(self, limits: Limits) -> Iterator[OriginProcess]:
        """Yield an origin that gives the repository so fast and so late."""
        with OriginProcess(self.repository.url, limits) as origin:
            yield origin

    @contextmanager
    def fresh_folder(self) -> Iterator[Path]:
        """Yield an empty folder, removed afterwards; what earlier runs left unwritten is on the disk by then."""
        os.sync()
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="run-") as name:
            yield Path(name)


def open_photos(repository: Repository) -> Split:
    """Return the only split of the photos."""
    return next(iter(open_dataset(repository, f"{NAME}@1").values()))


def time_curl(url: str, infos: Sequence[ObjectInfo], requests: int, folder: Path) -> float:
    """Get objects with curl, one request each, so many at once, into files of `folder`; returns seconds."""
    started = time.perf_counter()
    lines = [f'url = "{url}/{Objects.path(info.digest)}"\noutput = "{folder}/{info.digest}"' for info in infos]
    command = ["curl", "--silent", "--fail", "--parallel", "--parallel-immediate", "--config", "-"]
    command += ["--parallel-max", str(requests)]
    subprocess.run(command, input="\n".join(lines), text=True, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    assert all((folder / info.digest).stat().st_size == info.size_bytes for info in infos)
    return seconds

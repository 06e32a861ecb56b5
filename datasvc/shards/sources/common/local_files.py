"""The files below a local folder, found some ten times faster than through fsspec, and never outside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from datasvc.errors import ConfigError


def find_local(root: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, path, bytes and time of change of every file below `root`, in no particular order.

    Names are paths below `root` with forward slashes. Bytes and time, in nanoseconds, are of what a link leads to.

    Raises:
        ConfigError: a link leads out of `root`, to nothing, or back to a folder above it.
        OSError: a folder cannot be read.
    """
    real_root = os.path.realpath(root)
    waiting: list[tuple[str, str, tuple[str, ...]]] = [(root, "", (real_root,))]
    while waiting:
        folder, before, above = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):  # known from the folder: nearly all entries end here
                    status = entry.stat()
                    yield before + entry.name, entry.path, status.st_size, status.st_mtime_ns
                    continue
                if entry.is_symlink():
                    check_inside(real_root, [entry.path])
                if entry.is_dir():
                    real = os.path.realpath(entry.path) if entry.is_symlink() else f"{above[-1]}/{entry.name}"
                    if real in above:
                        raise ConfigError(f"{entry.path} leads back to a folder that holds it; remove this link")
                    waiting.append((entry.path, f"{before}{entry.name}/", (*above, real)))
                elif entry.is_file():
                    status = entry.stat()
                    yield before + entry.name, entry.path, status.st_size, status.st_mtime_ns


def check_inside(root: str, paths: Sequence[str]) -> None:
    """Raise ConfigError when what a local path leads to lies outside `root`, or is not there."""
    real_root = os.path.realpath(root)
    for path in paths:
        real = os.path.realpath(path)
        if real != real_root and not real.startswith(f"{real_root.rstrip('/')}/"):
            raise ConfigError(
                f"{path} leads out of the source, to {real}; copy it into the source, or ingest that folder too"
            )
        if not os.path.exists(real):
            raise ConfigError(f"{path} is a link to {real}, where nothing is; remove it")

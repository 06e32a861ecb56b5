"""Files that an option of a command names, such as `--svg` and `--html`."""

from __future__ import annotations

from pathlib import Path


def write_output_file(path: Path, content: bytes) -> None:
    """Write a file, which replaces an old one when it is complete.

    Raises:
        NotFoundError: the folder of `path` does not exist.
        ConfigError, UnavailableError: the file cannot be written.
    """
    from datasvc import durable
    from datasvc.errors import NotFoundError
    from datasvc.repository.store.retries import map_exceptions

    if not path.parent.is_dir():
        raise NotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    with map_exceptions("write", str(path)):
        durable.write_file(path, content)

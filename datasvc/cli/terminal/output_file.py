"""Files that an option of a command names, such as `--svg` and `--html`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.terminal.output import print_line
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.drawing import VersionNode

LastOption = Annotated[int | None, typer.Option(min=1, help="Only this number of the newest versions.")]
SvgOption = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write the graph of the versions to this SVG file.")
]


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


def write_version_graph(path: Path, nodes: Sequence[VersionNode], name: str) -> None:
    """Write the graph of all `nodes` to an SVG file, which replaces an old file, and say so on standard error.

    Raises:
        NotFoundError: the folder of `path` does not exist.
        ConfigError, UnavailableError: the file cannot be written.
    """
    from datasvc.drawing import standalone, version_graph

    drawing = standalone(version_graph(nodes, limit=len(nodes), title=f"versions of {name}"))
    write_output_file(path, drawing.encode())
    print_line(f"wrote {count_text(len(nodes), 'version')} to {path}", err=True)

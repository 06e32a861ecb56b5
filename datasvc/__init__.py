"""Versioned data sets and model checkpoints for training; README.md is the guide, ARCHITECTURE.md the structure.

`import datasvc` is cheap: torch, DALI, Arrow and cloud clients are imported by the modules that use them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    _message = (
        f"datasvc runs on Linux only, and this is {sys.platform}: use a Linux machine, a container "
        "(docs/how-to/images.md), or WSL 2 on Windows"
    )
    if sys.argv[0].replace("\\", "/").rpartition("/")[2].removesuffix(".exe") in {"datasvc", "datasvc-run"}:
        sys.exit(_message)  # one line in place of a traceback
    raise ImportError(_message)

from datasvc.errors import DatasvcError

if TYPE_CHECKING:
    from typing import Unpack

    from datasvc.api import DataRepository
    from datasvc.shards.ingestion.ingest import AnySource, IngestReport
    from datasvc.shards.ingestion.options import IngestOptions

__version__ = "0.1.0"
__all__ = ["DatasvcError", "__version__", "ingest", "open"]


def open(  # noqa: A001 - users write `datasvc.open(url)`
    url: str | os.PathLike[str], *, create: bool = False, unavailable_ok: bool = False
) -> DataRepository:
    """Open the repository at `url`.

    Args:
        url: local folder, also as a `Path`, or any fsspec URL.
        create: create the repository if it does not exist.
        unavailable_ok: open it also if the store does not respond now, for a run that can continue from the disks of
            the nodes (`repo.models.manager(local=)`); what reads or writes it raises the error then.

    Raises:
        NotFoundError: there is no repository at `url`, and `create` is false.
        ConfigError: the repository has a later format; no driver for the URL is installed; or, with `create`, the
            store has no create-only write, which every commit needs.
        UnavailableError: the store does not respond, and `unavailable_ok` is false.
    """
    from datasvc.api import DataRepository

    return DataRepository.open(url, create=create, unavailable_ok=unavailable_ok)


def ingest(
    source: AnySource,
    name: str,
    *,
    repo: str | os.PathLike[str],
    **options: Unpack[IngestOptions],
) -> IngestReport:
    """Ingest `source` as the next version of data set `name`; create the repository at the URL `repo` if needed.

    Short for `datasvc.open(repo, create=True).datasets.ingest(source, name, ...)`. For the options and errors, see
    `Datasets.ingest`.
    """
    return open(repo, create=True).datasets.ingest(source, name, **options)

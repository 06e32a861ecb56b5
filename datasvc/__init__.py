"""Training data from raw files to resumable training: see README.md, and ARCHITECTURE.md for the house.

Importing this is cheap: torch, DALI, Arrow and cloud clients load where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasvc.errors import DatasvcError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from datasvc.api import DataRepository
    from datasvc.shards.ingestion.ingest import IngestReport
    from datasvc.shards.sources import Source

__version__ = "0.1.0"
__all__ = ["DatasvcError", "__version__", "ingest", "open"]


def open(url: str, *, create: bool = False) -> DataRepository:  # noqa: A001 - reads as `datasvc.open(url)`
    """Open the repository at `url`, a local folder or any fsspec URL.

    Args:
        url: where it lies.
        create: make it first where there is none.

    Raises:
        NotFoundError: there is none, and `create` is false.
        ConfigError: it has a later format, or its store cannot hold our logs.
        UnavailableError: the store does not answer.
    """
    from datasvc.api import DataRepository

    return DataRepository.open(url, create=create)


def ingest(
    source: str | Source | Iterable[Mapping[str, Any]], name: str, *, repo: str, **options: Any
) -> IngestReport:
    """Ingest `source` as the next version of data set `name` in the repository at `repo`, made where there is none.

    Args:
        source: folder, file, pattern or any fsspec URL; or an iterable of samples, dicts of Python values by column.
        name: of the data set.
        repo: local folder or any fsspec URL.
        options: those of `datasvc.shards.ingest`, such as `workers=8` or `append=True`.

    Raises:
        DatasvcError: as `datasvc.shards.ingest`.
    """
    return open(repo, create=True).ingest(source, name, **options)

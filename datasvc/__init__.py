"""Versioned data sets and model checkpoints for training; README.md is the guide, ARCHITECTURE.md the structure.

`import datasvc` is cheap: torch, DALI, Arrow and cloud clients are imported by the modules that use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasvc.errors import DatasvcError

if TYPE_CHECKING:
    from datasvc.api import DataRepository
    from datasvc.shards.ingestion.ingest import AnySource, IngestReport

__version__ = "0.1.0"
__all__ = ["DatasvcError", "__version__", "ingest", "open"]


def open(url: str, *, create: bool = False) -> DataRepository:  # noqa: A001 - reads as `datasvc.open(url)`
    """Open the repository at `url`.

    Args:
        url: local folder or any fsspec URL.
        create: create the repository if it does not exist.

    Raises:
        NotFoundError: there is no repository at `url`, and `create` is false.
        ConfigError: the repository has a later format, or its store lacks an operation that the logs need.
        UnavailableError: the store does not respond.
    """
    from datasvc.api import DataRepository

    return DataRepository.open(url, create=create)


def ingest(source: AnySource, name: str, *, repo: str, **options: Any) -> IngestReport:
    """Ingest `source` as the next version of data set `name`.

    Args:
        source: folder, file, pattern or any fsspec URL; or an iterable of samples, each a dict of Python values by
            column name.
        name: name of the data set.
        repo: repository, a local folder or any fsspec URL; created if it does not exist.
        options: options of `datasvc.shards.ingest`, such as `workers=8` or `append=True`.

    Raises:
        DatasvcError: the ingest failed; see `datasvc.shards.ingest`.
    """
    return open(repo, create=True).ingest(source, name, **options)

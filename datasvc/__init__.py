"""Training data from raw files to resumable training: see README.md, and ARCHITECTURE.md for the house.

Importing this is cheap: torch, DALI, Arrow and cloud clients load where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasvc.errors import DatasvcError

if TYPE_CHECKING:
    from datasvc.api import DataRepository

__version__ = "0.1.0"
__all__ = ["DatasvcError", "__version__", "open"]


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

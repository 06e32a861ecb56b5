"""Opens `REFERENCE[SELECTION]`: a version with views of its splits in place of the splits; see `open_dataset`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository import Repository
from datasvc.repository.logs.references import is_name
from datasvc.shards.versions.dataset import DatasetVersion, Split, open_dataset
from datasvc.shards.views.choose import where
from datasvc.shards.views.named import find_named

_DIGESTS: Final = re.compile(r"[0-9a-f]{64}(,[0-9a-f]{64})*")


def open_view(repository: Repository, reference: str, selection: str) -> ViewedDataset:
    """Return the version that `reference` refers to, with views; for arguments and errors, see `open_dataset`."""
    version = open_dataset(repository, reference)
    if is_name(selection) and not is_digests(selection) and not _is_column(version, selection):
        named = find_named(repository, version.resolved.name, selection)
        if reference == version.resolved.name:
            version = open_dataset(repository, named.dataset)
        elif str(version.resolved) != named.dataset:
            raise ConfigError(
                f"{reference}[{selection}] is a view of {named.dataset}; make one of {version.resolved} too"
            )
        selection = named.table
    return ViewedDataset(version, selection)


def is_digests(selection: str) -> bool:
    """Return whether a selection is the digests of views, which always open the same samples."""
    return _DIGESTS.fullmatch(selection) is not None


def _is_column(version: DatasetVersion, name: str) -> bool:
    """Return whether a selection may be a condition: a column of Booleans."""
    return any(name in split.table.sample_schema.names for split in version.values())


def find_view(split: Split, digest: str) -> Split | None:
    """Return the view of a split of a version whose table has a digest; None if there is no such view of it.

    Raises:
        CorruptDataError, UnavailableError: the table cannot be read.
    """
    view = Split(split.name, split.dataset, split.repository, digest)
    with suppress(NotFoundError):
        return view if view.table.view is not None and view.table.view.table == split.digest else None
    return None


def name_exactly(version: DatasetVersion, splits: Sequence[str]) -> str:
    """Return a reference that opens the same samples of these splits later: a version, with the digests of views."""
    views = [version[name] for name in splits if name in version]
    digests = [view.digest for view in views if view.table.view is not None]
    return f"{version.resolved}[{','.join(digests)}]" if digests else str(version.resolved)


class ViewedDataset(DatasetVersion):
    """A version with views in place of its splits. A condition is evaluated for each split when it is opened.

    Args:
        version: the version.
        selection: a condition, or digests of views with commas.

    Attributes:
        is_stored: whether all views are stored, so that none is evaluated.

    Raises:
        NotFoundError: `selection` is a digest, and no view of the version has it.
    """

    def __init__(self, version: DatasetVersion, selection: str) -> None:
        super().__init__(version.repository, version.resolved, version.entry)
        self._selection = selection
        self._views: dict[str, Split] = {}
        self.is_stored = is_digests(selection)
        if self.is_stored:
            for digest in selection.split(","):
                found = [view for split in version.values() if (view := find_view(split, digest))]
                if not found:
                    raise NotFoundError(
                        f"{version.resolved} has no view with the table {digest[:12]}...; give its condition, and "
                        "the view is made again"
                    )
                self._views |= {view.name: view for view in found}
            self._views = {**version, **self._views}

    def __getitem__(self, split: str) -> Split:
        """Return the view of the split of this name. For errors, see `DatasetVersion` and `Split.where`."""
        if split not in self._views:
            self._views[split] = where(super().__getitem__(split), self._selection)
        return self._views[split]

    @property
    def title(self) -> str:
        """See `DatasetVersion.title`."""
        return f"{self.resolved}[{self._selection}]"

"""Read access to a data-set version: its splits, and single samples by number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.order import AccessOrder, OrderConfig
from datasvc.printable import count_text
from datasvc.repository import Entry, Repository, Resolved, Storage, parse_reference
from datasvc.repository.logs.references import split_selection
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import keep_valid
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.shard_stores import OriginShards, open_listed_shard
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.commit import ancestors_of, check_splits, newest_entries, renamed_to
from datasvc.shards.lines.dataset_log import DatasetLog
from datasvc.shards.packing.packs import Packs
from datasvc.shards.packing.row_cache import RowMap
from datasvc.shards.versions.deletions import Deletions, load_deletions
from datasvc.shards.versions.samples import Sample, choose_columns, image_columns, read_columns
from datasvc.shards.versions.weights import OrderInputs, Weights, open_order, open_order_inputs
from datasvc.shown import Shown, to_frame

if TYPE_CHECKING:
    import pandas as pd

_MAX_OPEN_SHARDS = 4  # of random access; an open shard of a remote repository is held in memory


class Split(Shown):
    """The live (not deleted) samples of one split: `split[5]` is a sample as a dict; `len(split)` counts them.

    Args:
        name: name of the split, such as "train".
        dataset: the version it belongs to, such as "digits@1".
        repository: the repository that stores its objects.
        digest: digest of its shard table; it identifies the samples and their shards.
    """

    def __init__(self, name: str, dataset: str, repository: Repository, digest: str) -> None:
        self.name = name
        self.dataset = dataset
        self.repository = repository
        self.digest = parse_digest(digest)
        self.origin = OriginShards(repository)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process receives no open files: it opens the repository and the shards with clients of its own.
        return _unpickle_split, (self.name, self.dataset, self.repository.storage, self.digest)

    def __repr__(self) -> str:
        return f"Split({self.title}, {count_text(len(self), 'sample')})"

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...

    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        """Return sample `number` as Python values: blobs as bytes, None for a missing column.

        Live samples are numbered in the order of the shard table. A slice, such as `split[0:2]`, returns a list.

        Raises:
            IndexError: `number` is out of range; negative numbers count from the end.
            CorruptDataError, NotFoundError, UnavailableError: see `OriginShards.open_shard`.
        """
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        live_number = number + len(self) if number < 0 else number
        if not 0 <= live_number < len(self):
            raise IndexError(f"sample {number} is outside 0..{len(self) - 1} of {self.dataset}/{self.name}")
        shard, stored_row = self._locate(live_number)
        sample = self._open_shard(shard).sample(stored_row)
        values = {name: sample.get(name) for name in self.table.sample_schema.names}
        return Sample.of(values, self._image_columns, self.classes)

    def is_purged(self, number: int) -> bool:
        """Return whether live sample `number`, from 0, was purged: its values are empty. Raises as `stored_rows`."""
        if not self.table.redacted:
            return False
        shard, row = self._locate(number)
        return row in self.table.redacted_rows(shard)

    def __iter__(self) -> Iterator[Sample]:
        return (self[number] for number in range(len(self)))

    def to_arrow(self, columns: Sequence[str] | None = None, *, num_samples: int | None = None) -> pa.Table:
        """Return columns of the first live samples as an Arrow table; all of it is in memory.

        Args:
            columns: names of the columns; None for all but blobs.
            num_samples: maximum number of samples; None for all.

        Raises:
            NotFoundError: there is no such column, or a shard is missing.
            CorruptDataError, UnavailableError: see `OriginShards.open_shard`.
        """
        schema = choose_columns(self.table.sample_schema, columns)
        wanted = len(self) if num_samples is None else min(num_samples, len(self))
        counts = np.diff(np.minimum(self._stops, wanted), prepend=0)  # samples to read of each shard
        shards = (
            (self._open_shard(number), self.stored_rows(number, np.arange(counts[number])))
            for number in np.flatnonzero(counts).tolist()
        )
        return read_columns(shards, schema)

    def to_pandas(self, columns: Sequence[str] | None = None, *, num_samples: int | None = None) -> pd.DataFrame:
        """Return `to_arrow` as a pandas frame. Raises its errors, and ConfigError if pandas is not installed."""
        return to_frame(self.to_arrow(columns, num_samples=num_samples))

    @cached_property
    def table(self) -> ShardTable:
        """The table of the split's shards. Raises CorruptDataError, NotFoundError, UnavailableError."""
        return ShardTable.read(self.repository.objects, self.digest)

    def stored_rows(self, shard: int, rows: Integers) -> Integers:
        """Return the row numbers of live samples in their shard's file, which has the deleted samples too.

        Args:
            shard: number of the shard in the table.
            rows: `int64[n]`, row numbers among the live samples of the shard, as the access order counts them.

        Returns:
            `int64[n]`, row numbers among all samples of the file; `rows` itself if the shard has no deletions.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the deletions cannot be read.
        """
        # Deletions are read only if the shard has any.
        return self.deletions.kept_rows(shard)[rows] if self._num_deleted[shard] else rows

    def stored_rows_of(self, shards: Integers, rows: Integers) -> Integers:
        """Return `stored_rows` of samples of several shards, `int64[n]` each. Raises its errors."""
        return self._row_map(shards, rows) if self.table.deletions is not None else rows

    @cached_property
    def deletions(self) -> Deletions:
        """The deleted samples. Raises what `load_deletions` raises."""
        return load_deletions(self.repository.objects, self.table)

    @cached_property
    def _row_map(self) -> RowMap:
        return self.deletions.row_map(self.table.stored_per_shard)

    @cached_property
    def _order_inputs(self) -> OrderInputs:
        return open_order_inputs(self.repository.objects, self.table)

    @property
    def weights(self) -> Weights | None:
        """The weights of the samples; None if the split is not weighted."""
        return self._order_inputs.weights

    @property
    def packs(self) -> Packs | None:
        """The packs of the documents; None if the split is not packed."""
        return self._order_inputs.packs

    @cached_property
    def num_positions(self) -> int:
        """Positions of an epoch: one for each pack of a packed split, else one for each live sample."""
        return self.table.num_positions

    def access_order(self, config: OrderConfig, epoch: int) -> AccessOrder:
        """Return the access order of an epoch; its rows are rows of `stored_rows`, or numbers of packs."""
        return open_order(self.table, self._order_inputs, config, epoch)

    @property
    def title(self) -> str:
        """Name for messages, such as "pets@3/train"; of a view, with what it selects."""
        return f"{self.dataset}/{self.name}" + (f"[{self.view}]" if self.view else "")

    @property
    def view(self) -> str | None:
        """How the samples of a view were chosen, such as "label <> 'cat'"; None for a split of a version."""
        return str(self.table.view) if self.table.view else None

    def where(self, condition: str) -> Split:
        """Return the view of the samples that satisfy a condition, for instance `label != 'cat' and width >= 64`.

        It is evaluated and stored now. `repo.dataset("pets@3[DIGEST]")` opens it by its digest, without evaluation.

        Args:
            condition: Boolean SQL expression over the columns, and `class`, the name of the label's class; a sample
                for which it is null is left out. `label` may be compared with names of classes too.

        Raises:
            ConfigError: the condition is not valid, names a column or class that does not exist, or selects nothing;
                or the repository is read-only.
            MissingPackageError: DuckDB is not installed.
            CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read, or the view not be stored.
        """
        view: Split = _views("choose").where(self, condition)
        return view

    def take(self, fraction: float, *, seed: int = 0) -> Split:
        """Return the view of about a fraction of the samples, those with a small hash of key and seed.

        A larger fraction has the samples of a smaller one, a later version those of this one. Raises as `where`.
        """
        view: Split = _views("choose").take(self, fraction, seed=seed)
        return view

    def split(self, *fractions: float, by: str | None = None, seed: int = 0) -> tuple[Split, ...]:
        """Return disjoint views with about these fractions of the samples: `train, val = split.split(0.9, 0.1)`.

        Args:
            fractions: the fractions; if their sum is below 1, the other samples are in no view.
            by: column whose groups of equal values stay together, such as "patient"; None: divide by key.
            seed: which samples or groups are in which view; equal in every version and process.

        Raises ConfigError: a sample has no value in `by`; or see `where`, with its other errors.
        """
        views: tuple[Split, ...] = _views("choose").divide(self, fractions, by=by, seed=seed)
        return views

    def weighted(
        self,
        column: str | None = None,
        *,
        weights: Sequence[float] | npt.NDArray[Any] | Mapping[str | int, float] | None = None,
    ) -> Split:
        """Return the view that serves each sample in proportion to its weight. An epoch is as long as before.

        Of N samples with the total weight W, a sample of weight w is served N * w / W times in each epoch, rounded
        down or up, and over many epochs in exact proportion; never if its weight is 0. Integers below 2**20 are kept;
        other weights are stored with 20 bits, relative to the largest.

        Args:
            column: column of the weights. Give either this or `weights`.
            weights: one weight per sample, as `split[number]` counts them, or the weight of each class, by name or
                label.

        Raises:
            ConfigError: a weight is negative, NaN, infinite or missing, or all are 0; the split is weighted already;
                or see `where`, with its other errors.
        """
        view: Split = _views("weigh").weighted(self, column, weights)
        return view

    def balanced(self, column: str = "label", strength: float = 1.0) -> Split:
        """Return the view whose classes, the values of a column, are served more evenly.

        A sample has the weight n**-strength, for n samples of its class: with 0, all is as it is; with 0.5, shares
        are as the square roots of the sizes; with 1, they are equal. For numbers and errors, see `weighted`.
        """
        view: Split = _views("weigh").balanced(self, column, strength)
        return view

    def packed(
        self,
        block_tokens: int,
        *,
        rule: str = "best-fit",
        column: str = "tokens",
        dtype: str | None = None,
        too_long: Literal["cut", "refuse"] = "cut",
        loss_mask: str | None = None,
        lengths: Callable[[pa.Table], Sequence[int] | npt.NDArray[Any]] | None = None,
    ) -> Split:
        """Return the view whose documents are packed into token blocks; a `TokenLoader` of it serves packs.

        A sample is a document. The packs are computed once for these arguments, and stored as a view that later
        calls open, except with `lengths`. `len()` of the view and its samples are those of the documents;
        `num_positions` is the number of packs. Documents of one shard share packs. Empty documents are in no pack,
        and neither are those without a counted token; `table.packing` has their numbers.

        Args:
            block_tokens: maximum number of tokens of a pack.
            rule: "best-fit": best fit decreasing inside groups of 2,048 documents in stored order.
            column: column of the tokens: lists of integers, or blobs with `dtype`. With a column `length`, a
                document has only its first `length` tokens.
            dtype: dtype of a token in blobs, such as "uint16".
            too_long: "cut": a document that is longer than a block is cut, and the last token of a part has no
                label; "refuse": it is an error.
            loss_mask: column of lists with a Boolean or integer for each token: 0 if the loss does not count it.
            lengths: function that takes the samples of a shard, without blobs, and returns the number of tokens to
                use of each, at most all; None: all.

        Raises:
            ConfigError: an argument is out of range; the column is missing, or has packed blocks already; the split
                is weighted or packed; a document is too long; no document has tokens; or see `where`.
            BadSampleError: a loss mask has another number of values than its document has tokens, or `lengths`
                returns other numbers.
        """
        view: Split = _views("pack").packed(
            self, block_tokens, rule, column, dtype, too_long=too_long, loss_mask=loss_mask, lengths=lengths
        )
        return view

    def grouped_by_aspect(self, group: int) -> Split:
        """Return the view that serves images of a similar aspect together, so that batches need little padding.

        Each epoch serves each sample as often as before, in groups: positions k * group to (k + 1) * group - 1 are
        neighbours among about 32 * `group` samples sorted by width : height. Samples that fill no group come last.
        The view is computed once and stored, and later calls open it.

        Args:
            group: samples of a group: the global batch, `batch_size` times the ranks. It is a part of the view, so a
                run continues with the same order at other numbers of ranks, and a batch that divides the group
                evenly has similar images there too.

        Raises:
            ConfigError: the column `image` has no measured sizes; the split has groups or packs; or see `where`,
                with its other errors.
        """
        view: Split = _views("group").grouped_by_aspect(self, group)
        return view

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; label i belongs to `classes[i]`. Empty for a split without class names."""
        return self.table.classes

    @cached_property
    def _image_columns(self) -> tuple[str, ...]:
        return image_columns(self.table.sample_schema)

    @cached_property
    def _num_deleted(self) -> Integers:  # per shard; cached, because the table computes it at each call
        return self.table.deleted_per_shard

    @cached_property
    def _stops(self) -> Any:  # for each shard, the number of live samples in it and in all shards before it
        return np.cumsum(self.table.samples_per_shard)

    def _locate(self, number: int) -> tuple[int, int]:
        """Return the shard of a live sample, and its row in the shard's file."""
        shard = int(np.searchsorted(self._stops, number, side="right"))
        start = int(self._stops[shard - 1]) if shard else 0
        (stored_row,) = self.stored_rows(shard, np.array([number - start])).tolist()
        return shard, stored_row

    def _open_shard(self, number: int) -> Shard:
        """Return a shard of the table, from the few that stay open for random access."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                self._open[number] = open_listed_shard(self.origin, self.repository.objects, self.table, number)
                # The least recently used shard is dropped first.
                while len(self._open) > _MAX_OPEN_SHARDS:
                    self._open.popitem(last=False)
            return self._open[number]


def _views(module: Literal["choose", "group", "pack", "reference", "weigh"]) -> Any:
    # A static import would make a split depend on its views, which are splits.
    return import_module(f"datasvc.shards.views.{module}")


def _unpickle_split(name: str, dataset: str, storage: Storage, digest: str) -> Split:
    return Split(name, dataset, Repository(storage), digest)


class DatasetVersion(Shown, Mapping[str, Split]):
    """One version of a data set: a mapping from split names to splits.

    Raises:
        CorruptDataError: the log entry has no valid list of splits.
    """

    def __init__(self, repository: Repository, resolved: Resolved, entry: Entry) -> None:
        self.repository = repository
        self.resolved = resolved
        self.entry = entry
        descriptions = check_splits(entry.content, resolved)
        self._splits = {
            name: Split(name, str(resolved), repository, split["table"])
            for name, split in sorted(descriptions.items())
        }

    def __getitem__(self, split: str) -> Split:
        """Return the split of this name. Raise NotFoundError, which lists the existing splits, if there is none."""
        if split not in self._splits:
            raise NotFoundError(f"{self.resolved} has no split {split!r}; it has: {', '.join(self._splits)}")
        return self._splits[split]

    def __contains__(self, split: object) -> bool:
        return split in self._splits

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    def __repr__(self) -> str:
        return f"Dataset({self.title}, {dict(self._splits)})"

    @property
    def title(self) -> str:
        """Name for messages, such as "pets@3"; with the selection if it has views."""
        return str(self.resolved)


def open_dataset(repository: Repository, ref: str) -> DatasetVersion:
    """Return the version that `ref` refers to now; with a selection, views take the place of its splits.

    Args:
        repository: the repository that stores the version.
        ref: the version, such as "pets@3" or "pets@3[SELECTION]". A selection is a condition, which each split must
            satisfy when it is opened, see `Split.where`; or the name of a view, or digests of views with commas,
            which take the place of their splits. A name without a version opens that of the named view.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`; or there is no such view.
        CorruptDataError: the log entry of the version is corrupt.
    """
    reference, selection = split_selection(ref)
    if selection is not None:
        views: DatasetVersion = _views("reference").open_view(repository, reference, selection)
        return views
    return read_version(repository, repository.resolve("datasets", reference))


def read_version(repository: Repository, resolved: Resolved) -> DatasetVersion:
    """Return a resolved version, even a removed one.

    Raises:
        NotFoundError: the entry records that the data set was renamed.
        CorruptDataError, UnavailableError: see `Repository.entry`.
    """
    entry = repository.entry(resolved)
    if new_name := renamed_to(entry):
        raise NotFoundError(f"{resolved.name} was renamed to {new_name}; use the new name")
    return DatasetVersion(repository, resolved, entry)


def find_renamed(repository: Repository, version: Resolved) -> Resolved | None:
    """Return a removed version by the present name of its data set; None if the data set was not renamed since.

    Raises:
        CorruptDataError, UnavailableError: see `Repository.entry`.
    """
    content = repository.entry(version).content
    names = [version.name]
    for name in names:  # grows by each name that the data set had next
        log = repository.versions("datasets", name)
        later, _ = log.try_entries(range(version.version + 1, log.head() + 1))
        for new_name in filter(None, map(renamed_to, later)):
            renamed = Resolved("datasets", new_name, version.version)
            # A rename copies entries byte by byte. If the new name has no such entry, the rename was taken back.
            with suppress(NotFoundError, CorruptDataError):
                if new_name in names or repository.entry(renamed).content != content:
                    continue
                if not repository.removals("datasets", new_name).removed([version.version]):
                    return renamed
                names.append(new_name)
    return None


def list_datasets(repository: Repository) -> list[DatasetVersion]:
    """Return the newest version of every data set, of its main line, sorted by name; see `newest_entries`."""
    return [DatasetVersion(repository, resolved, entry) for resolved, entry in newest_entries(repository)]


def readable_versions(repository: Repository, name: str, *, last: int | None = None) -> DatasetLog:
    """Return the entries of the `last` newest versions of a data set (None: all), oldest first, with removed ones.

    The versions are those of all branches; of NAME@BRANCH, its head and the ancestors of this version.

    An entry that cannot be read, or has no valid splits, is left out with an `UnreadableVersionWarning`. For errors,
    see `Repository.entries`, and `ancestors_of` for a branch.
    """
    reference = parse_reference(name)
    if reference.tag is None or reference.tag not in repository.branches(reference.name):
        entries = repository.entries("datasets", name, last=last)
    else:
        numbers = islice(ancestors_of(repository, repository.resolve("datasets", name)), last)
        entries = repository.readable_entries("datasets", reference.name, sorted(numbers))
    valid = keep_valid("datasets", reference.name, entries, check_splits)
    return DatasetLog(reference.name, valid, repository)


def choose_split(dataset: DatasetVersion, split: str | None) -> list[Split]:
    """Return the named split, or all splits for None. Raise NotFoundError if there is no such split."""
    return [dataset[split]] if split is not None else list(dataset.values())

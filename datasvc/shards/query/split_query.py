"""SQL conditions, orders and expressions over the live samples of some shards of a split, with the samples' numbers.

Pages of samples and histograms use it. A split may have thousands of shards. Whoever shows a page reads a bounded
number of them, and says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.shards.format.object_files import ObjectFiles
from datasvc.shards.query.query import check_names, check_reads_live_samples
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.labels import with_class
from datasvc.sql_sandbox import connected, fetch, lock

if TYPE_CHECKING:
    import duckdb

    from datasvc.shards.query.scan import LiveSamples  # loads Arrow's data sets and pandas: only a query needs them

_T = TypeVar("_T")


class SplitQuery:
    """A DuckDB relation of the samples of some shards. Created by `open_query`.

    Attributes:
        number: name of the column with the number of each sample.
        relation: the relation, with the columns of the split and `number`.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, split: Split, files: ObjectFiles, number: str) -> None:
        self.number = number
        self.relation: Any = connection.view("samples")
        self._connection = connection
        self._split = split
        self._files = files

    def where(self, condition: str | None) -> None:
        """Keep the samples that satisfy a boolean SQL expression. Raise ConfigError if it is not valid."""
        if condition is not None:
            # A new line before the bracket, because the expression may end in a comment.
            self.apply(condition, lambda: self.relation.filter(f"({condition}\n)"))

    def equals(self, column: str, value: str) -> None:
        """Keep the samples with this text in a column."""
        import duckdb

        same = duckdb.ColumnExpression(column) == duckdb.ConstantExpression(value)
        self.apply(value, lambda: self.relation.filter(same))

    def order(self, terms: str) -> None:
        """Sort by SQL terms, such as `width desc`, and then by number. Raise ConfigError if they are not valid."""
        self.apply(terms, lambda: self.relation.order(f"{terms}\n, {self.number}"))

    def apply(self, text: str, step: Callable[[], Any]) -> None:
        """Replace the relation by the result of `step`; `text` is the user's SQL, for the message of an error."""
        with self._mapped_errors(text):
            self.relation = step()

    def fetch(self, text: str, read: Callable[[Any], _T]) -> _T:
        """Return `read(relation)`, which executes the query; `text` is the user's SQL.

        Raises:
            ConfigError: the query fails for a sample, for instance a cast of text that is not a number.
            NotFoundError, CorruptDataError, UnavailableError: a shard cannot be read.
        """
        with self._mapped_errors(text):
            return fetch(self._connection, lambda: read(self.relation))

    @contextmanager
    def _mapped_errors(self, text: str) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            # DuckDB passes on only the text of an error that a scan raised; `files` has the error itself.
            if self._files.failure is not None:
                raise self._files.failure from error
            names = with_class(self._split.table.sample_schema, self._split.classes).names
            reason, columns = str(error).partition("\n")[0], ", ".join(names)
            raise ConfigError(
                f"{text!r} cannot be evaluated on {self._split.dataset}/{self._split.name}: {reason}; the columns "
                f"are {columns}"
            ) from error


@contextmanager
def open_query(split: Split, shards: Sequence[int]) -> Iterator[SplitQuery]:
    """Open a query over the live samples of some shards, in this order.

    Only the columns that the query uses are read, and not checked against digests, as in `query.query`. The SQL has
    no access to anything else.

    Raises:
        ConfigError: column names differ in case only.
        CorruptDataError, NotFoundError, UnavailableError: the table or the deletions cannot be read.
    """
    from datasvc.shards.query.scan import LiveSamples

    schema = split.table.sample_schema
    check_names(f"{split.dataset}/{split.name}", schema.names)
    files = _files(split)
    number = "datasvc_number"
    while number in {name.lower() for name in schema.names}:
        number += "_"
    samples = LiveSamples.of(split, files, shards=shards, number_column=number)
    with ExitStack() as scans, connected() as connection:
        # A query may end before its scans do, for instance by LIMIT.
        scans.callback(samples.close)
        check_reads_live_samples(connection)
        connection.register("samples", samples)
        lock(connection)
        yield SplitQuery(connection, split, files, number)


@contextmanager
def open_sizes(split: Split, shards: Sequence[int]) -> Iterator[LiveSamples]:
    """Open the live samples of some shards with the sizes of blobs in place of the blobs; for errors, see above."""
    from datasvc.shards.query.scan import LiveSamples

    samples = LiveSamples.of(split, _files(split), shards=shards, sizes=True)
    try:
        yield samples
    finally:
        samples.close()


def _files(split: Split) -> ObjectFiles:
    sizes = {info.digest: info.size_bytes for info in split.table.shards()}
    return ObjectFiles(split.repository.storage, sizes)


def choose_shards(num_shards: int, limit: int | None) -> Integers:
    """Return at most `limit` shard numbers, evenly spaced over all shards: `int64[n]`, ascending; None: all."""
    if limit is None or num_shards <= limit:
        return np.arange(num_shards)
    # The middle of each of `limit` equal parts.
    return np.asarray((2 * np.arange(limit) + 1) * num_shards // (2 * limit), np.int64)

"""SQL over the live samples of a version: whole queries, and conditions, orders and expressions over some shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.keyed_random import Integers
from datasvc.repository import Repository
from datasvc.shards.format.ipc_reader import ObjectFiles
from datasvc.shards.format.schema import KEY
from datasvc.shards.versions.dataset import DatasetVersion, Split, open_dataset
from datasvc.shards.versions.labels import with_class
from datasvc.sql_sandbox import connected, fetch, lock, only_query

if TYPE_CHECKING:
    import duckdb

    from datasvc.shards.query.scan import LiveSamples  # loads Arrow's data sets and pandas: only a query needs them


ALL_SPLITS: Final = "samples"
CLASSES: Final = "classes"
SPLIT_COLUMN: Final = "split"


_T = TypeVar("_T")


def query(repository: Repository, ref: str, sql: str) -> pa.Table:
    """Return the result of a SQL query over a data-set version.

    There is a view per split, with the split's name; a view `samples` of all splits with a column `split`
    (`split_name` if samples have a column `split`); and a table `classes` with `label` and `name`. Labels with class
    names have the column `class` beside them, unless the samples have a column of this name. Deleted samples
    are left out, and columns that a shard does not have are null. The query has no access to anything else: files,
    network, or variables of this program.

    Local shards are mapped, remote ones are read by byte range, and unused columns are not read. So the bytes are not
    checked against the shards' digests; `verify` does that.

    Args:
        repository: the repository that stores the version.
        ref: the version.
        sql: one query in DuckDB's dialect.

    Returns:
        The result, in memory.

    Raises:
        ConfigError: DuckDB rejects the query; the message has its reason.
        MissingPackageError: DuckDB is not installed.
        NotFoundError, CorruptDataError, UnavailableError: a shard cannot be read; or see `open_dataset`.
    """
    with explain_missing("a query in SQL"):
        import duckdb
    from datasvc.shards.query.scan import LiveSamples

    dataset = open_dataset(repository, ref)
    sizes = {shard.digest: shard.size_bytes for split in dataset.values() for shard in split.table.shards()}
    files = ObjectFiles(repository.storage, sizes)
    samples = {name: LiveSamples.of(split, files) for name, split in dataset.items()}
    # A query may end before its scans do, for instance by LIMIT. Scans that are still open are closed here; otherwise
    # they would read while Python exits.
    with ExitStack() as scans, connected() as connection:
        for live_samples in samples.values():
            scans.callback(live_samples.close)
        try:
            check_reads_live_samples(connection)
            _register(connection, dataset, samples)
            lock(connection)
            statement = only_query(connection, sql, example=f"from {ALL_SPLITS} limit 3")
            return fetch(connection, lambda: connection.sql(statement).to_arrow_table())
        except duckdb.Error as error:
            # DuckDB passes on only the text of an error that a scan raised; `files` has the error itself.
            if files.failure is not None:
                raise files.failure from error
            raise ConfigError(f"DuckDB cannot execute this query on {dataset.resolved}: {error}") from error


def _register(
    connection: duckdb.DuckDBPyConnection, dataset: DatasetVersion, samples: Mapping[str, LiveSamples]
) -> None:
    """Register the views and the table that `query` documents. Raise ConfigError if names differ in case only."""
    split_names = {name.lower() for name in dataset}  # SQL ignores case
    check_names(str(dataset.resolved), list(dataset))
    for split in dataset.values():
        check_names(f"{split.dataset}/{split.name}", split.table.sample_schema.names)
        connection.register(split.name, samples[split.name])
    # A split with the name of the table or view below takes precedence over it.
    if CLASSES not in split_names:
        connection.register(CLASSES, _class_table(dataset))
    if ALL_SPLITS not in split_names:
        connection.execute(f"CREATE TEMP VIEW {ALL_SPLITS} AS {_union(dataset)}")


def check_reads_live_samples(connection: duckdb.DuckDBPyConnection) -> None:
    """Raise ConfigError if this version of DuckDB does not read data sets through their `scanner`."""
    import duckdb

    from datasvc.shards.query.scan import ScannerProbe

    # Such a version would silently return deleted samples. `ScannerProbe` has a sample only for a scanner.
    connection.register("probe", ScannerProbe(pa.table({KEY: pa.array([], pa.string())})))
    if connection.execute("SELECT count(*) FROM probe").fetchall() != [(1,)]:
        raise ConfigError(
            f"DuckDB {duckdb.__version__} does not read through Arrow scanners, so it would return deleted "
            "samples; upgrade it"
        )
    connection.unregister("probe")


def _union(dataset: DatasetVersion) -> str:
    """Return the SQL of the view of all splits, with a column for the split's name."""
    columns = {name.lower() for split in dataset.values() for name in split.table.sample_schema.names}
    column = quote_name(SPLIT_COLUMN if SPLIT_COLUMN not in columns else f"{SPLIT_COLUMN}_name")
    return " UNION ALL BY NAME ".join(
        f"SELECT {quote_text(name)} AS {column}, * FROM {quote_name(name)}"  # noqa: S608 - names are quoted
        for name in dataset
    )


def _class_table(dataset: DatasetVersion) -> pa.Table:
    classes = {(label, name) for split in dataset.values() for label, name in enumerate(split.classes)}
    labels, names = zip(*sorted(classes), strict=True) if classes else ((), ())
    return pa.table({"label": pa.array(labels, pa.int32()), "name": pa.array(names, pa.string())})


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise ConfigError if two names differ in case only; `where` is what has them, for the message."""
    if len({name.lower() for name in names}) != len(names):
        raise ConfigError(f"{where} has names that differ in case only, and SQL ignores case: {names}")


def quote_name(name: str) -> str:
    """Return a name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


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

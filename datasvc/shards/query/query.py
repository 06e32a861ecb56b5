"""SQL over a data-set version, by DuckDB, on the shards themselves: only columns that a query uses are read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.repository import Repository
from datasvc.shards.format.object_files import ObjectFiles
from datasvc.shards.query.scan import LiveSamples, probe
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset

if TYPE_CHECKING:
    import duckdb

ALL_SPLITS: Final = "samples"
CLASSES: Final = "classes"
SPLIT_COLUMN: Final = "split"
_SETTINGS: Final = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "arrow_large_buffer_size": True,  # a column of blobs may exceed 2 GiB
}


def query(repository: Repository, ref: str, sql: str) -> pa.Table:
    """Return what a query says of a data-set version.

    There is a view for each split, named as the split; the view `samples` over all of them, with a column `split`
    (`split_name` where samples have a column `split`); and the table `classes` with `label` and `name`. Deleted
    samples are not in them, and columns that a shard lacks are null. The query can read nothing else: no file, no
    network, no variable of this program.

    Shards are mapped where the repository is local, and read by ranges of bytes where it is not: of a column that
    the query does not use nothing is read. So bytes are not checked against the shards' digests; `verify` does that.

    Args:
        repository: where the version is.
        ref: the version.
        sql: one query, as DuckDB understands it.

    Returns:
        The result, in memory.

    Raises:
        ConfigError: DuckDB is not installed, or refuses the query; with what it says.
        NotFoundError, CorruptDataError, UnavailableError: a shard cannot be read; or as `open_dataset`.
    """
    dataset = open_dataset(repository, ref)
    sizes = {shard.digest: shard.size_bytes for split in dataset.values() for shard in split.table.shards()}
    files = ObjectFiles(repository.storage, sizes)
    samples = {name: LiveSamples.of(split, files) for name, split in dataset.items()}
    # A query may end before its scans do, such as by LIMIT: none may read on while the interpreter ends.
    with ExitStack() as scans, _connected() as connection:
        for each in samples.values():
            scans.callback(each.close)
        try:
            _check_reads_live_samples(connection)
            _register(connection, dataset, samples)
            # No files, no network, no variables of this program, and no way back.
            connection.execute("SET enable_external_access = false; SET lock_configuration = true")
            return connection.sql(_only_query(connection, sql)).to_arrow_table()
        except _duckdb().Error as error:
            if files.failure is not None:
                raise files.failure from error
            raise ConfigError(f"DuckDB cannot answer this query of {dataset.resolved}: {error}") from error


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(f"SQL needs DuckDB, which is not installed: {how_to_install('sql')}") from error
    return duckdb


@contextmanager
def _connected() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database in memory that may spill to a temporary folder."""
    duckdb = _duckdb()
    with (
        tempfile.TemporaryDirectory(prefix="datasvc-sql-", ignore_cleanup_errors=True) as folder,
        closing(duckdb.connect(config={**_SETTINGS, "temp_directory": folder})) as connection,
    ):
        yield connection


def _only_query(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    kinds = _duckdb().StatementType
    statements = connection.extract_statements(sql)
    # PIVOT is more than one statement to DuckDB.
    if len(statements) != 1 or statements[0].type not in {kinds.SELECT, kinds.EXPLAIN, kinds.MULTI}:
        raise ConfigError(f"{sql!r} is not one query, such as 'from {ALL_SPLITS} limit 3'")
    return statements[0]


def _register(
    connection: duckdb.DuckDBPyConnection, dataset: DatasetVersion, samples: Mapping[str, LiveSamples]
) -> None:
    names = {name.lower() for name in dataset}
    _check_names(str(dataset.resolved), list(dataset))
    for split in dataset.values():
        _check_names(f"{split.dataset}/{split.name}", split.table.sample_schema.names)
        connection.register(split.name, samples[split.name])
    # A split that is named like one of these is what its name means.
    if CLASSES not in names:
        connection.register(CLASSES, _class_table(dataset))
    if ALL_SPLITS not in names:
        connection.execute(f"CREATE TEMP VIEW {ALL_SPLITS} AS {_union(dataset)}")


def _check_reads_live_samples(connection: duckdb.DuckDBPyConnection) -> None:
    # A DuckDB that went past our scanner would show deleted samples, and nobody would notice.
    connection.register("probe", probe())
    if connection.execute("SELECT count(*) FROM probe").fetchall() != [(1,)]:
        raise ConfigError(f"DuckDB {_duckdb().__version__} cannot read data sets as datasvc needs; upgrade it")
    connection.unregister("probe")


def _union(dataset: DatasetVersion) -> str:
    columns = {name.lower() for split in dataset.values() for name in split.table.sample_schema.names}
    column = _quoted(SPLIT_COLUMN if SPLIT_COLUMN not in columns else f"{SPLIT_COLUMN}_name")
    return " UNION ALL BY NAME ".join(
        f"SELECT {_literal(name)} AS {column}, * FROM {_quoted(name)}"  # noqa: S608 - names are quoted
        for name in dataset
    )


def _class_table(dataset: DatasetVersion) -> pa.Table:
    named = {(label, name) for split in dataset.values() for label, name in enumerate(split.classes)}
    labels, names = zip(*sorted(named), strict=True) if named else ((), ())
    return pa.table({"label": pa.array(labels, pa.int32()), "name": pa.array(names, pa.string())})


def _check_names(where: str, names: Sequence[str]) -> None:
    if len({name.lower() for name in names}) != len(names):
        raise ConfigError(f"{where} has names that differ in case alone, which SQL does not tell apart: {names}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

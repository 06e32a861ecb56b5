"""Write the units of an export (usually one shard each) in worker processes, one unit at a time in each process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context

from datasvc.child_process import end_with_parent
from datasvc.errors import UnavailableError
from datasvc.repository import Repository
from datasvc.shards.export.destination import Destination
from datasvc.shards.export.export_format import ExportFormat, WrittenFiles
from datasvc.shards.export.formats import FORMATS
from datasvc.shards.export.samples import ExportUnit
from datasvc.shards.versions.dataset import Split, open_dataset


def write_in_processes(
    units: Sequence[ExportUnit], export_format: ExportFormat, destination: Destination, workers: int
) -> Iterator[tuple[ExportUnit, WrittenFiles]]:
    """Write units in worker processes; yield each written unit with its result, in any order.

    Raises:
        UnavailableError: a worker was killed.
        DatasvcError: the first error of a unit; units that have not started are cancelled.
    """
    # Spawned, not forked: clients of object stores do not work after a fork.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent)
    try:
        futures = {
            pool.submit(
                _write_unit,
                # Only names and numbers are sent: a worker opens the repository, the table and the destination.
                (unit.split.repository.url, unit.split.dataset, unit.split.name),
                (unit.shards, unit.number, unit.num_units),
                export_format.name,
                destination.storage.url,
            ): unit
            for unit in units
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UnavailableError(
            "a worker process was killed, perhaps for lack of memory; repeat the export with fewer workers: "
            "it continues with the shards that are not yet written"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _write_unit(
    split: tuple[str, str, str], unit: tuple[tuple[int, ...], int, int], export_format: str, destination: str
) -> WrittenFiles:
    """Write a unit. `split` has the arguments of `_open_split`, and `unit` those of `ExportUnit` after the split."""
    return FORMATS[export_format].write(ExportUnit(_open_split(*split), *unit), Destination(destination))


@lru_cache(maxsize=1)
def _open_split(repository: str, version: str, split: str) -> Split:
    """Return a split. It is cached, so that a worker reads its table once, and not for each unit."""
    # One split is enough, because the units of a split follow each other.
    return open_dataset(Repository.open(repository), version)[split]

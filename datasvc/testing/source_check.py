"""Checks that a source fulfils the contract of `StreamedSource`; for tests of the sources of datasvc and of users."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, SourcePart, StreamedSource


class CheckedSamples(NamedTuple):
    """Samples of a source, or of a part of it, in order: the good ones as a table, and the unreadable ones."""

    table: pa.Table
    bad: list[BadSample]


def check_source(source: StreamedSource, *, is_read_once: bool = False) -> CheckedSamples:
    """Read all parts of a source, and return their samples if it fulfils the contract of `StreamedSource`.

    By this contract, batches have the source's columns, a bounded size, and nulls only where the schema permits them.
    A part has as many samples as the listing states. Keys are unique in each split. A pickled copy, as worker
    processes get it, has the same fingerprint, and the same samples in whatever order its parts are read.

    Args:
        source: source to check.
        is_read_once: whether the source reads an iterator, which can be neither read again nor pickled.

    Raises:
        ConfigError: the source breaks a rule of the contract; the message has the part and the rule.
        DatasvcError: see `StreamedSource.read`.
    """
    reads = [read_part(source, part) for part in source.parts]
    samples = CheckedSamples(
        pa.concat_tables([source.schema.empty_table(), *(read.table for read in reads)]),
        [bad for read in reads for bad in read.bad],
    )
    keys = [
        (part.split, key)
        for part, read in zip(source.parts, reads, strict=True)
        for key in read.table.column(KEY).to_pylist()
    ]
    _require(len(keys) == len(set(keys)), source.url, "keys are unique in a split")
    if not is_read_once:
        copy = pickle.loads(pickle.dumps(source))  # noqa: S301 - made in the same call
        _require(copy.fingerprint() == source.fingerprint(), source.url, "a pickled copy has the same fingerprint")
        # Read the parts in another order than above: the samples of a part must not depend on parts read before.
        for part, read in reversed(list(zip(copy.parts, reads, strict=True))):
            is_same = _content(read_part(copy, part)) == _content(read)
            _require(is_same, part.name, "each read of a part gives the same samples")
    return samples


def read_part(source: StreamedSource, part: SourcePart) -> CheckedSamples:
    """Read one part once, and check its batches as `check_source` describes; for errors, see `check_source`."""
    batches: list[pa.RecordBatch] = []
    bad: list[BadSample] = []
    for item in source.read(part):
        if isinstance(item, BadSample):
            _require(item.split == part.split, part.name, "a bad sample has the split of its part")
            bad.append(item)
        else:
            _check_batch(item, source.schema, part.name)
            batches.append(item)
    table = pa.Table.from_batches(batches, source.schema)
    # One bad sample may stand for the whole rest of a part, so the number of samples cannot be checked.
    is_complete = bool(bad) or part.num_samples in {None, table.num_rows}
    _require(is_complete, part.name, f"it has the {part.num_samples} samples of the listing")
    return CheckedSamples(table, bad)


def _check_batch(batch: pa.RecordBatch, schema: pa.Schema, name: str) -> None:
    _require(batch.schema.equals(schema, check_metadata=True), name, "batches have the columns of the source")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{name} has an invalid batch: {error}; build it with `SampleBatcher`") from error
    is_small = 0 < batch.num_rows <= BATCH_SAMPLES and (batch.num_rows == 1 or batch.nbytes <= BATCH_BYTES)
    _require(is_small, name, f"a batch has 1 to {BATCH_SAMPLES} samples, and at most {BATCH_BYTES} bytes or 1 sample")
    nulls = [field.name for field, column in zip(schema, batch, strict=True) if column.null_count]
    _require(all(schema.field(column).nullable for column in nulls), name, "only nullable columns have nulls")


def _content(samples: CheckedSamples) -> tuple[list[str], list[bytes], list[BadSample]]:
    """Return values that are equal for equal samples. For Arrow, tables with NaN are not equal, but digests are."""
    digests = [digest for batch in samples.table.to_batches() for digest in digest_batch(batch)[0]]
    return samples.table.column(KEY).to_pylist(), digests, samples.bad


def _require(holds: bool, subject: str, rule: str) -> None:
    """Raise ConfigError unless the rule holds for `subject`, a source or a part of it."""
    if not holds:
        raise ConfigError(f"{subject} breaks a rule for sources: {rule}; see `StreamedSource`")

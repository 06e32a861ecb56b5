"""Source that reads samples from a Python iterable of dicts, for data that a program makes or fetches.

`ingest` uses it if it gets an iterable in place of a URL.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.objects.objects import Digest, digest_of
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.columns import ColumnMap, SampleBatcher, bisect_errors, infer_table
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource, printable
from datasvc.shards.sources.common.tables import name_labels

_NUM_FIRST_SAMPLES: Final = 100  # from which the columns are inferred


class PythonSource(StreamedSource):
    """Samples of an iterable, which is read only once, in the calling process.

    Columns and their types are inferred from the first samples; a later sample that does not fit is a `BadSample`.

    Args:
        samples: dicts of Python values by column; images as bytes, arrays as lists.
        options: only `split` and `key` are used.

    Raises:
        NotFoundError: the iterable is empty.
        ConfigError: a sample is not a mapping, or a column holds values of several types.
    """

    kind: ClassVar[str] = "python"

    def __init__(self, samples: Iterable[Mapping[str, Any]], options: SourceOptions | None = None) -> None:
        options = options or SourceOptions()
        iterator = iter(samples)
        first = list(itertools.islice(iterator, _NUM_FIRST_SAMPLES))
        if not first:
            raise NotFoundError("cannot ingest an iterable without samples; expected at least one dict")
        for sample in first:
            _check_mapping(sample)
        # Each sample needs a key: if one of the first samples has none, all samples get their numbers as keys.
        has_keys = options.key is not None or all(KEY in sample for sample in first)
        keyed = first if has_keys else [_with_number(sample, number) for number, sample in enumerate(first)]
        self._has_keys = has_keys
        table = infer_table(keyed)
        columns = ColumnMap(table.schema, table, key=options.key)
        self._columns, _ = name_labels(columns, options, lambda name: [table.column(name)], classes=None)
        # Columns and types of the samples as they are given; `ColumnMap` converts them to `schema`.
        self._raw = table.select(self._columns.raw_names).schema
        self._samples = itertools.chain(first, iterator)
        self.url = "python"
        self.schema = self._columns.schema
        self.classes: tuple[str, ...] = ()
        self.ignored: Counter[str] = Counter()
        self.parts = [SourcePart(options.split or DEFAULT_SPLIT, "python", 0)]

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are numbers: true unless the samples have keys."""
        return not self._has_keys

    def fingerprint(self) -> Digest:
        """Return a random digest: samples cannot be compared before they are read, so no two sources are equal."""
        return digest_of(secrets.token_bytes(32))

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples; a second call yields none.

        Raises:
            ConfigError: a sample is not a mapping.
        """
        names, required = set(self._raw.names), self._columns.required
        batcher = SampleBatcher(self._raw, part.split)
        for number, original in enumerate(self._samples):
            _check_mapping(original)
            sample = original if self._has_keys else _with_number(original, number)
            value = sample.get(self._columns.key or KEY)
            # A sample without a key is named by its position; the text of a nested value may take any time.
            key = f"sample {number}" if value is None or isinstance(value, (list, tuple, Mapping)) else str(value)
            if unknown := sample.keys() - names:
                yield BadSample(part.split, printable(key), f"has unknown columns {sorted(unknown, key=str)}")
            elif missing := [name for name in required if sample.get(name) is None]:
                yield BadSample(part.split, printable(key), f"has no {' and no '.join(missing)}")
            elif printable(key) != key:
                yield BadSample(part.split, printable(key), "its key is not UTF-8")
            else:
                yield from self._convert(batcher.add(sample))
        yield from self._convert(batcher.flush())

    def _convert(self, pieces: Iterator[pa.RecordBatch | BadSample]) -> Iterator[pa.RecordBatch | BadSample]:
        """Convert batches of the given columns to batches of `schema`."""
        for piece in pieces:
            if isinstance(piece, BadSample):
                yield piece
                continue

            # No keys are passed, because one of the given columns holds them.
            def convert(start: int, stop: int, batch: pa.RecordBatch = piece) -> pa.RecordBatch:
                return self._columns.convert(batch.slice(start, stop - start), [])

            for first, batch in bisect_errors(piece.num_rows, convert, (ConfigError,)):
                if isinstance(batch, Exception):
                    key = piece.column(self._columns.key or KEY)[first].as_py()
                    yield BadSample(self.parts[0].split, str(key), str(batch))
                else:
                    yield batch


def _with_number(sample: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a sample with its number as its key."""
    # Bad samples are numbered too, so that the repair of one does not change the keys of the others.
    return {**sample, KEY: f"{number:09d}"}


def _check_mapping(sample: Any) -> None:
    if not isinstance(sample, Mapping):
        raise ConfigError(f"a sample must be a dict of values by column; got {type(sample).__name__}")

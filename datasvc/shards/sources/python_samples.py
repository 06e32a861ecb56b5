"""Samples that a Python program makes: any iterable of dicts."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.objects.objects import Digest, digest_of
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.columns import ColumnMap, SampleBatcher, infer_columns
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource, printable
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT

_LOOKED_AT: Final = 100


class PythonSamples(StreamedSource):
    """Samples from an iterable, read once, in this process.

    Columns and their types come from the first samples; a sample that does not fit is a bad one.

    Args:
        samples: dicts of Python values by column; images as bytes, arrays as lists.
        options: `split` and `key` are of use.

    Raises:
        NotFoundError: there is no sample.
        ConfigError: a sample is no mapping, or a column holds values of several types.
    """

    kind: ClassVar[str] = "python"

    def __init__(self, samples: Iterable[Mapping[str, Any]], options: SourceOptions | None = None) -> None:
        options = options or SourceOptions()
        iterator = iter(samples)
        first = list(itertools.islice(iterator, _LOOKED_AT))
        if not first:
            raise NotFoundError("cannot ingest an iterable without samples")
        for sample in first:
            _check_mapping(sample)
        has_keys = options.key is not None or all(KEY in sample for sample in first)
        numbered = first if has_keys else [_numbered(sample, number) for number, sample in enumerate(first)]
        self._has_keys = has_keys
        self._columns: ColumnMap = infer_columns(numbered, key=options.key)
        names = self._columns.raw_names
        self._raw = pa.schema([(name, pa.array([sample.get(name) for sample in numbered]).type) for name in names])
        self._samples = itertools.chain(first, iterator)
        self.url = "python"
        self.schema = self._columns.schema
        self.classes: tuple[str, ...] = ()
        self.ignored: Counter[str] = Counter()
        self.parts = [SourcePart(options.split or DEFAULT_SPLIT, "python", 0)]

    def fingerprint(self) -> Digest:
        """Return a digest that no other iterable has: what an iterable will yield cannot be known before."""
        return digest_of(secrets.token_bytes(32))

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples, the first time. Raises ConfigError for a sample that is no mapping."""
        names = set(self._raw.names)
        raw = SampleBatcher(self._raw, part.split)
        for number, given in enumerate(self._samples):
            _check_mapping(given)
            sample = given if self._has_keys else _numbered(given, number)
            key = str(sample.get(self._columns.key or KEY))
            reason = _reason_against(key, sample.keys() - names)
            if reason:
                yield BadSample(part.split, printable(key), reason)
                continue
            yield from self._converted(raw.add(sample))
        yield from self._converted(raw.flush())

    def _converted(self, pieces: Iterator[pa.RecordBatch | BadSample]) -> Iterator[pa.RecordBatch | BadSample]:
        for piece in pieces:
            yield piece if isinstance(piece, BadSample) else self._columns.convert(piece, [])


def _numbered(sample: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a sample with its number as its key: bad ones count, so mending one moves no other."""
    return {**sample, KEY: f"{number:09d}"}


def _reason_against(key: str, unknown: Collection[str]) -> str | None:
    if unknown:
        return f"has unknown columns {sorted(unknown)}"
    return None if printable(key) == key else "its key is not UTF-8"


def _check_mapping(sample: Any) -> None:
    if not isinstance(sample, Mapping):
        raise ConfigError(f"a sample must be a dict of values by column; got {type(sample).__name__}")

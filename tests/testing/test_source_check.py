"""A source that breaks a rule of `StreamedSource` is refused, with the rule."""

# ruff: noqa: ARG002 - broken sources ignore what they are asked for

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
import pytest

from datasvc.errors import ConfigError
from datasvc.shards.sources import BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES
from datasvc.testing import check_source

SCHEMA = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("x", pa.float64(), nullable=False)])
READS = []


@dataclass
class Numbers(StreamedSource):
    """Two parts with two samples each."""

    kind: ClassVar[str] = "numbers"
    classes: ClassVar[tuple[str, ...]] = ()

    url: str = "numbers"
    schema: pa.Schema = SCHEMA
    ignored: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.parts = [SourcePart("train", name, 0, 2) for name in ("a", "b")]

    def read(self, part):
        yield self.batch([f"{part.name}#0", f"{part.name}#1"])

    def batch(self, keys, values=None, **columns):
        return pa.record_batch({"key": keys, "x": values or [float("nan")] * len(keys), **columns}, schema=SCHEMA)


class OtherColumns(Numbers):
    def read(self, part):
        yield self.batch(["0", "1"]).rename_columns(["key", "y"])


class Invalid(Numbers):
    def read(self, part):
        offsets = pa.py_buffer(bytes([0, 0, 0, 0, 99, 0, 0, 0, 2, 0, 0, 0]))
        keys = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
        yield pa.RecordBatch.from_arrays([keys, pa.array([1.0, 2.0])], schema=SCHEMA)


class Large(Numbers):
    def read(self, part):
        yield self.batch(["." * BATCH_BYTES, "b"])


class Long(Numbers):
    def read(self, part):
        yield self.batch([str(number) for number in range(BATCH_SAMPLES + 1)])


class Empty(Numbers):
    def read(self, part):
        yield self.batch([])


class Nulls(Numbers):
    def read(self, part):
        yield self.batch(["a", "b"], [None, 1.0])


class Short(Numbers):
    def read(self, part):
        yield self.batch([part.name])


class SameKeys(Numbers):
    def read(self, part):
        yield self.batch(["0", "1"])


class OtherSplit(Numbers):
    def read(self, part):
        yield BadSample("val", "a", "broken")


class Restless(Numbers):
    def read(self, part):
        READS.append(part)
        yield self.batch([f"{part.name}#{len(READS)}", f"{part.name}#x"])


class Forgetful(Numbers):
    def __setstate__(self, state):
        self.__dict__.update({**state, "parts": state["parts"][:1]})


def test_samples_and_bad_samples_of_a_good_source_are_returned_in_order_with_its_nan():
    samples = check_source(Numbers())
    assert samples.table.column("key").to_pylist() == ["a#0", "a#1", "b#0", "b#1"]
    assert samples.bad == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (OtherColumns, "columns of the source"),
        (Invalid, "an invalid batch"),
        (Large, "at most 1048576 bytes or 1 sample"),
        (Long, "1 to 4096 samples"),
        (Empty, "1 to 4096 samples"),
        (Nulls, "only nullable columns have nulls"),
        (Short, "a breaks .* it has the 2 samples of the listing"),
        (SameKeys, "keys are unique in a split"),
        (OtherSplit, "a bad sample has the split of its part"),
        (Restless, "b breaks .* each read of a part gives the same samples"),
        (Forgetful, "a pickled copy has the same fingerprint"),
    ],
)
def test_a_broken_rule_is_named(source, rule):
    with pytest.raises(ConfigError, match=rule):
        check_source(source())


def test_a_source_that_is_read_once_is_read_once():
    assert check_source(Restless(), is_read_once=True).table.num_rows == 4

"""Tools for tests of programs that use datasvc: a store that fails on request, a clock, small data, source checks.

Nothing in the product imports this package.
"""

from datasvc.testing.faulty_store import FakeClock, FaultyStore
from datasvc.testing.small_data import encode_jpeg, small_dataset
from datasvc.testing.source_check import CheckedSamples, check_source

__all__ = [
    "CheckedSamples",
    "FakeClock",
    "FaultyStore",
    "check_source",
    "encode_jpeg",
    "small_dataset",
]

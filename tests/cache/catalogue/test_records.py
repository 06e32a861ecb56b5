"""How the catalogue writes its rows: what is read is what was written, and keys sort as they shall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.records import (
    ObjectRecord,
    eviction_key,
    eviction_value,
    footprint,
    parse_eviction_key,
    parse_eviction_value,
)
from datasvc.repository import Digest
from tests.support.fuzzing import changed_bytes, counts_refusals

numbers = st.integers(0, 2**63)
digests = st.binary(min_size=32, max_size=32).map(lambda raw: Digest(raw.hex()))
names = st.text(st.characters(min_codepoint=45, max_codepoint=122), max_size=30)
records = st.builds(ObjectRecord, st.integers(0, 2), numbers, numbers, names, names)


@given(records)
def test_a_record_survives(record):
    assert ObjectRecord.decode(record.encode()) == record
    assert parse_eviction_value(eviction_value(record)) == (record.used_bytes, record.tenant)


@given(names, numbers, digests)
def test_an_order_key_survives(owner, next_use, digest):
    assert parse_eviction_key(eviction_key(owner, next_use, digest)) == (owner, next_use, digest)


@given(names, numbers, numbers, digests, digests)
def test_keys_of_one_owner_sort_by_next_use(owner, one, other, digest, other_digest):
    if one < other:
        assert eviction_key(owner, one, digest) < eviction_key(owner, other, other_digest)


@counts_refusals(ValueError)
@given(st.binary(max_size=40) | records.flatmap(lambda record: changed_bytes(record.encode())))
def test_what_is_no_record_is_a_value_error_and_nothing_else(content):
    ObjectRecord.decode(content)


@pytest.mark.parametrize(("size", "used"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_a_file_takes_whole_blocks(size, used):
    assert footprint(size) == used

"""Sample indexes: keys and digests beside a shard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.deletions import Deletions
from datasvc.shards.index import SampleIndex

digest = st.binary(min_size=16, max_size=16)
indexed = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), digest, digest), max_size=20)


@given(indexed)
def test_an_index_decodes_to_what_was_encoded_and_equal_indexes_give_equal_bytes(samples):
    columns = [list(column) for column in zip(*samples, strict=True)] or [[], [], []]
    raw = SampleIndex.build(*columns).encode()
    decoded = SampleIndex.decode(raw, "test")
    assert decoded.encode() == raw
    assert decoded.num_samples == len(samples)
    assert decoded.keys == columns[0]
    for place, name in enumerate(("sample", "payload"), 1):
        found = decoded.digests(name)
        assert [each.tobytes() for each in found] == columns[place]
        assert np.array_equal(
            found == found[::-1], [a == b for a, b in zip(columns[place], columns[place][::-1], strict=True)]
        )


@pytest.mark.parametrize("raw", [b"", b"no arrow", Deletions.build({}).encode()])
def test_what_is_no_index_is_corrupt(raw):
    with pytest.raises(CorruptDataError, match="no sample index"):
        SampleIndex.decode(raw, "test")


def test_an_index_of_a_later_format_is_refused(monkeypatch):
    raw = SampleIndex.build([], [], []).encode()
    monkeypatch.setattr("datasvc.shards.index.INDEX_FORMAT", 0)
    with pytest.raises(ConfigError, match="sample index format 1; this datasvc reads up to 0"):
        SampleIndex.decode(raw, "test")

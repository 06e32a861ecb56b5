"""Segments, document numbers, positions and labels against what a loop over tokens says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datasvc.loaders.tokens.token_decoder import (
    IGNORED,
    find_segments,
    number_documents,
    number_positions,
    segment_sizes,
    write_labels,
)

BLOCK = 6


@st.composite
def batches(draw):
    """Return lengths, and where documents start in each block, in any order."""
    lengths = draw(st.lists(st.integers(0, BLOCK), max_size=5))
    pairs = [
        (row, start)
        for row in range(len(lengths))
        for start in draw(st.sets(st.integers(0, BLOCK - 1), max_size=BLOCK))
    ]
    return np.array(lengths, np.int64), draw(st.permutations(pairs))


def token_by_token(length, starts):
    """Return document, position and the sizes of segments of one block."""
    documents, positions, sizes = [], [], []
    for place in range(BLOCK):
        is_padding = place >= length
        if place in (0, length) or (place in starts and not is_padding):
            documents.append(-1 if is_padding else len(sizes))
            positions.append(0)
            sizes.append(1)
        else:
            documents.append(documents[-1])
            positions.append(positions[-1] + 1)
            sizes[-1] += 1
    return documents, positions, sizes


@given(batches())
def test_documents_positions_and_bounds_are_those_that_a_loop_over_tokens_finds(batch):
    lengths, pairs = batch
    rows, starts = (np.array([pair[index] for pair in pairs], np.int64) for index in (0, 1))
    expected = [
        token_by_token(length, {start for row, start in pairs if row == number})
        for number, length in enumerate(lengths.tolist())
    ]
    segments = find_segments(rows, starts, lengths, BLOCK)
    sizes = segment_sizes(segments, len(lengths) * BLOCK)
    documents = number_documents(segments, sizes, lengths, BLOCK)
    positions = np.empty((len(lengths), BLOCK), np.int64)
    number_positions(segments, sizes, positions)
    assert documents.dtype == np.int32
    assert documents.tolist() == [each[0] for each in expected]
    assert positions.tolist() == [each[1] for each in expected]
    assert sizes.tolist() == [size for each in expected for size in each[2]]


@given(batches())
def test_a_label_is_the_next_real_token_of_the_block_and_within_documents_of_the_document(batch):
    lengths, pairs = batch
    rows, starts = (np.array([pair[index] for pair in pairs], np.int64) for index in (0, 1))
    tokens = np.arange(len(lengths) * BLOCK).reshape(-1, BLOCK) + 1000
    segments = find_segments(rows, starts, lengths, BLOCK)
    for cuts, inside in ((None, False), (segments, True)):
        labels = np.empty_like(tokens)
        write_labels(tokens, lengths, labels, segments=cuts)
        for row, length in enumerate(lengths.tolist()):
            for place in range(BLOCK):
                has_next = place + 1 < length and not (inside and (row, place + 1) in pairs)
                assert labels[row, place] == (tokens[row, place + 1] if has_next else IGNORED)

"""Tables of any columns, for properties, and what their samples must be."""

import pyarrow as pa
from hypothesis import strategies as st

from datasvc.shards.sources.common.columns import looks_like_image

LEAVES = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=20),
    pa.large_binary(): st.binary(max_size=20).filter(lambda blob: not looks_like_image(blob)),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.decimal128(12, 3): st.decimals(-(10**8), 10**8, places=3),
}


def types():
    return st.recursive(
        st.sampled_from([kind for kind in LEAVES if kind != pa.large_binary()]),
        lambda inner: (
            inner.map(pa.list_)
            | st.lists(inner, min_size=1, max_size=3).map(
                lambda kinds: pa.struct([(f"f{number}", kind) for number, kind in enumerate(kinds)])
            )
        ),
        max_leaves=4,
    ) | st.just(pa.large_binary())


def values(kind):
    if pa.types.is_list(kind):
        found = st.lists(values(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values(field.type) for field in kind.fields})
    else:
        found = LEAVES[kind]
    return st.none() | found


@st.composite
def tables(draw):
    """Draw a table of some samples and columns, with nulls."""
    num_samples = draw(st.integers(1, 20))
    kinds = draw(st.lists(types(), min_size=1, max_size=4))
    columns = {
        f"c{number}": pa.array(draw(st.lists(values(kind), min_size=num_samples, max_size=num_samples)), kind)
        for number, kind in enumerate(kinds)
    }
    return pa.table(columns)

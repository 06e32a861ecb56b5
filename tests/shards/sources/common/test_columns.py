import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources.common.column_types import join_schemas
from datasvc.shards.sources.common.columns import ColumnMap, SampleBatcher, infer_table, looks_like_image
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample
from tests.samples import jpeg


def mapped(table, **options):
    """Return a table's samples as the map makes them."""
    table = pa.table(table) if isinstance(table, dict) else table
    columns = ColumnMap(table.schema, table, **options)
    keys = [str(number) for number in range(table.num_rows)]
    return columns, columns.convert(table.combine_chunks().to_batches()[0], keys)


def batched(schema, samples):
    batcher = SampleBatcher(schema, "train")
    return [found for sample in samples for found in batcher.add(sample)] + list(batcher.flush())


BINARY_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())]


@pytest.mark.parametrize("binary", BINARY_TYPES, ids=str)
def test_bytes_that_start_like_an_image_become_the_column_image(binary):
    content = [jpeg(), jpeg(seed=1)]
    columns, batch = mapped({"picture": pa.array(content).cast(binary)})
    assert columns.schema.names == ["key", "image"]
    assert is_image(columns.schema.field("image"))
    assert batch.column("image").type == pa.large_binary()
    assert batch.column("image").to_pylist() == content


def test_other_bytes_keep_their_name_and_are_no_image():
    columns, batch = mapped({"sound": [b"RIFF....AVI ", b""]})
    assert columns.schema.names == ["key", "sound"]
    assert not is_image(columns.schema.field("sound"))
    assert batch.column("sound").to_pylist() == [b"RIFF....AVI ", b""]


def test_two_image_columns_keep_their_names():
    columns, _ = mapped({"left": [jpeg()], "right": [jpeg(seed=1)]})
    assert [field.name for field in columns.schema if is_image(field)] == ["left", "right"]


def test_a_file_struct_gives_its_bytes_and_nulls():
    files = pa.array(
        [None, {"bytes": jpeg(), "path": "a.jpg"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    columns, batch = mapped({"photo": files})
    assert columns.schema.field("image").nullable
    assert batch.column("image").to_pylist() == [None, jpeg()]


def test_a_file_struct_that_holds_only_a_path_is_named():
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns, _ = mapped({"photo": pa.array([{"bytes": jpeg(), "path": None}], kind)})
    only_path = pa.record_batch({"photo": pa.array([{"bytes": None, "path": "lost.jpg"}], kind)})
    with pytest.raises(ConfigError, match=r"photo.*lost\.jpg.*no bytes"):
        columns.convert(only_path, ["0"])


NESTED = {
    "list of categories": (
        pa.array([["a", None]]),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.list_(pa.string()),
    ),
    "list view": (pa.array([[1, 2]], pa.list_view(pa.int64())), pa.list_view(pa.int64()), pa.list_(pa.int64())),
    "list of nothing": (pa.array([[None]]), pa.list_(pa.null()), pa.list_(pa.string())),
    "fixed list": (pa.array([[1, 2]]), pa.list_(pa.int64(), 2), pa.list_(pa.int64(), 2)),
    "view of text": (pa.array(["a"]), pa.string_view(), pa.string()),
    "large text": (pa.array(["a"]), pa.large_string(), pa.string()),
    "nothing": (pa.nulls(1), pa.null(), pa.string()),
    "fixed bytes": (pa.array([b"ab"]), pa.binary(2), pa.large_binary()),
    "struct": (pa.array([{"a": {"b": [1.5]}}]), pa.struct([("a", pa.struct([("b", pa.list_(pa.float64()))]))]), None),
    "decimal": (pa.array([1]).cast(pa.decimal128(30, 2)), pa.decimal128(30, 2), None),
    "half": (pa.array([np.float16(1)]), pa.float16(), None),
}


@pytest.mark.parametrize("name", NESTED)
def test_types_are_kept_but_for_their_encoding(name):
    values, raw, wanted = NESTED[name]
    columns, batch = mapped({"column": values.cast(raw) if values.type != raw else values})
    assert columns.schema.field("column").type == (wanted or raw)
    if name != "fixed bytes":
        assert batch.column("column").to_pylist() == values.to_pylist()


def test_list_views_become_lists_in_any_order_and_with_nulls():
    views = pa.ListViewArray.from_arrays(
        [3, 0, 1, 0], [1, 2, 0, 1], pa.array([1, 2, 3, 4]), mask=pa.array([False, False, False, True])
    )
    _, batch = mapped({"column": views})
    batch.validate(full=True)
    assert batch.column("column").type == pa.list_(pa.int64())
    assert batch.column("column").to_pylist() == [[4], [1, 2], [], None]


def test_run_ends_are_decoded():
    _, batch = mapped({"column": pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])})
    assert batch.column("column").to_pylist() == ["a", "a", "b"]


def test_an_integer_label_is_int32_and_one_that_does_not_fit_is_refused():
    columns, batch = mapped({"cls": pa.array([3], pa.uint8())})
    assert columns.schema.field("label").type == pa.int32()
    assert batch.column("label").to_pylist() == [3]
    columns, _ = mapped({"label": [1]})
    with pytest.raises(ConfigError, match="label"):
        columns.convert(pa.record_batch({"label": [1 << 40]}), ["0"])


def test_a_label_beside_another_class_column_wins():
    columns, _ = mapped({"class": [1], "label": [2]})
    assert columns.schema.names == ["key", "class", "label"]


def test_sizes_of_the_source_make_way_for_measured_ones_only_beside_an_image():
    columns, _ = mapped({"image": [jpeg()], "width": [1], "height": [1]})
    assert columns.schema.names == ["key", "image", "source_width", "source_height"]
    columns, _ = mapped({"image": ["a.jpg"], "width": [1]})
    assert columns.schema.names == ["key", "image", "width"]


@pytest.mark.parametrize(
    "values", [["7", "8"], [7, 8], pa.array(["7", "8"]).dictionary_encode(), pa.array(["7", "8"], pa.large_string())]
)
def test_a_column_called_key_or_the_one_of_the_option_holds_the_keys(values):
    for name, options in (("key", {}), ("id", {"key": "id"})):
        columns, batch = mapped({name: values, "x": [1, 2]}, **options)
        assert columns.schema.names == ["key", "x"]
        assert batch.column("key").to_pylist() == ["7", "8"]


def test_keys_are_never_null():
    columns, _ = mapped({"key": ["a"]})
    with pytest.raises(ConfigError, match=r"key.*null"):
        columns.convert(pa.record_batch({"key": pa.array([None], pa.string())}), ["0"])


def test_an_image_that_is_missing_later_is_refused():
    columns, _ = mapped({"image": [jpeg()]})
    with pytest.raises(ConfigError, match=r"image.*null"):
        columns.convert(pa.record_batch({"image": pa.array([None], pa.binary())}), ["0"])


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ({"x": [1]}, {"key": "id"}, "the key column 'id' does not exist"),
        ({"key": [1.5]}, {}, "cannot hold keys"),
        ({"key": ["a"], "id": ["b"]}, {"key": "id"}, "would be called"),
        (pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]), {}, r"two columns called \['x'\]"),
    ],
)
def test_columns_that_cannot_be_are_refused(table, options, message):
    with pytest.raises(ConfigError, match=message):
        mapped(table, **options)


def test_a_missing_column_is_named():
    columns, _ = mapped({"x": [1], "y": [2]})
    with pytest.raises(ConfigError, match="'y' is missing"):
        columns.convert(pa.record_batch({"x": [1]}), ["0"])


@pytest.mark.parametrize(
    "start", [b"\xff\xd8\xff\xe0", b"RIFF1234WEBPVP8 ", b"\x89PNG\r\n\x1a\n", b"II*\0", b"BM\x10\0\0\0\0\0\0\0\x36"]
)
def test_images_are_known_by_their_first_bytes(start):
    assert looks_like_image(start)
    assert not looks_like_image(b"." + start)


@pytest.mark.parametrize("nothing", [b"", None, b"BM", b"BMW cars are"])
def test_nothing_and_text_are_no_images(nothing):
    assert not looks_like_image(nothing)


def test_samples_that_do_not_fit_are_named_and_the_others_kept_in_order():
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), ("x", pa.int64())])
    samples = [
        {"key": "a", "x": 1},
        {"key": "b", "x": "one"},
        {"key": "c"},
        {"key": "d", "y": 1},
        {"key": "e", "x": 1 << 70},
        {"key": "f", "x": 2},
    ]
    found = batched(schema, samples)
    assert {bad.key: bad.reason.split()[0] for bad in found if isinstance(bad, BadSample)} == {
        "b": "does",
        "d": "has",
        "e": "does",
    }
    good = [sample for batch in found if not isinstance(batch, BadSample) for sample in batch.to_pylist()]
    assert good == [{"key": "a", "x": 1}, {"key": "c", "x": None}, {"key": "f", "x": 2}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.large_binary(), b"." * 300_000),
        (pa.list_(pa.int64()), [1] * 40_000),
        (pa.list_(pa.string()), ["." * 1000] * 300),
        (pa.list_(pa.float32()), np.ones(80_000, np.float32)),
        (pa.struct([("a", pa.large_binary())]), {"a": b"." * 300_000}),
    ],
    ids=str,
)
def test_batches_hold_no_more_than_their_bytes(kind, value):
    schema = pa.schema([("key", pa.string()), ("x", kind)])
    batches = batched(schema, [{"key": str(number), "x": value} for number in range(10)])
    assert sum(batch.num_rows for batch in batches) == 10
    assert all(batch.num_rows > 1 for batch in batches[:-1])
    assert all(batch.nbytes <= BATCH_BYTES for batch in batches)


def test_a_large_sample_does_not_join_a_batch_begun():
    schema = pa.schema([("key", pa.string()), ("x", pa.large_binary())])
    batches = batched(schema, [{"key": "a", "x": b"a"}, {"key": "b", "x": b"." * (3 * BATCH_BYTES)}])
    assert [batch.num_rows for batch in batches] == [1, 1]


def test_batches_hold_no_more_than_their_samples():
    schema = pa.schema([("key", pa.string())])
    batches = batched(schema, [{"key": str(number)} for number in range(BATCH_SAMPLES + 1)])
    assert [batch.num_rows for batch in batches] == [BATCH_SAMPLES, 1]


def test_columns_are_inferred_over_all_first_samples():
    table = infer_table([{"x": 1}, {"x": 1.5, "y": ["a"]}])
    columns = ColumnMap(table.schema, table)
    assert columns.schema.field("x").type == pa.float64()
    assert columns.schema.field("y").type == pa.list_(pa.string())


@pytest.mark.parametrize("values", [[1, "a"], [1 << 70], [object()]])
def test_values_without_one_type_are_refused(values):
    with pytest.raises(ConfigError, match="'x'"):
        infer_table([{"x": value} for value in values])


def schema_of(**types):
    return pa.schema(list(types.items()))


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.float64(), pa.float32(), pa.float64()),
        (pa.null(), pa.date32(), pa.date32()),
        (pa.date32(), pa.null(), pa.date32()),
        (pa.list_(pa.int8()), pa.list_(pa.int16()), pa.list_(pa.int16())),
        (pa.list_(pa.null()), pa.list_(pa.int16()), pa.list_(pa.int16())),
        (pa.string(), pa.dictionary(pa.int8(), pa.string()), pa.string()),
    ],
)
def test_files_whose_types_differ_in_width_share_the_wider(one, other, joined):
    assert join_schemas([("a", schema_of(x=one)), ("b", schema_of(x=other))]).field("x").type == joined


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.float64()),
        (pa.int64(), pa.string()),
        (pa.list_(pa.int64()), pa.int64()),
        (pa.list_(pa.int64()), pa.list_(pa.string())),
        (pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int64())])),
        (pa.timestamp("s"), pa.timestamp("ns")),
    ],
)
def test_files_whose_types_differ_in_kind_are_named(one, other):
    with pytest.raises(ConfigError, match=r"'x' is .* in second\.f, but .* in first\.f"):
        join_schemas([("first.f", schema_of(x=one)), ("second.f", schema_of(x=other))])


def test_files_may_order_their_columns_as_they_like_but_have_the_same():
    first, swapped = schema_of(x=pa.int8(), y=pa.int8()), schema_of(y=pa.int8(), x=pa.int8())
    assert join_schemas([("a", first), ("b", swapped)]).names == ["x", "y"]
    with pytest.raises(
        ConfigError, match=r"columns of b\.f differ from those of a\.f: \['y'\] are missing and \['z'\] are extra"
    ):
        join_schemas([("a.f", first), ("b.f", schema_of(x=pa.int8(), z=pa.int8()))])

"""Parses TensorFlow's `Example` without TensorFlow, and chooses the columns for its named features.

As in example.proto: Example {Features features = 1}, Features {map<string, Feature> feature = 1}, Feature
{BytesList = 1 | FloatList = 2 | Int64List = 3}, each list {repeated value = 1}, packed or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError
from datasvc.printable import count_text
from datasvc.shards.sources.common.columns import ColumnMap
from datasvc.shards.sources.common.protobuf import BYTES, FIXED32, VARINT, read_fields, read_packed_varints, to_signed

FeatureKind = Literal["bytes", "float", "int64"]
_KINDS: Final[dict[int, FeatureKind]] = {1: "bytes", 2: "float", 3: "int64"}
# Features that TensorFlow's own ImageNet scripts write, and the column names that loaders expect for them.
_USUAL_NAMES: Final = {"image/encoded": "image", "image/class/label": "label"}


@dataclass(frozen=True)
class Feature:
    """One feature of one example: its values are a list of bytes, `float32[n]` or `int64[n]`."""

    kind: FeatureKind
    values: Sequence[bytes] | npt.NDArray[Any]


class SequenceExampleError(BadSampleError):
    """The message is a SequenceExample, which cannot be converted to columns."""


def parse_example(message: bytes | memoryview) -> dict[str, Feature]:
    """Return the features of an Example by name; features whose kind is not set are left out.

    Raises:
        SequenceExampleError: the message has feature lists.
        BadSampleError: the message is not an Example.
    """
    features: dict[str, Feature] = {}
    for number, value in _messages(message, "Example"):
        if number == 2:
            raise SequenceExampleError(
                "it is a SequenceExample; write its steps as Examples, or as lists of one Example"
            )
        if number != 1:
            raise BadSampleError(f"not an Example: it has a field {number}")
        for _, entry in _messages(value, "Features"):
            fields = dict(_messages(entry, "feature"))  # of a map entry: 1 is the name, 2 the Feature
            feature = _parse_feature(fields.get(2, memoryview(b"")))
            if feature is not None:
                features[_feature_name(fields.get(1, memoryview(b"")))] = feature
    return features


@dataclass(frozen=True)
class FeatureColumn:
    """The column for one feature: its name in the source's schema, None if the feature is the key, and its values.

    A sample may have several values if `is_list`.
    """

    column: str | None
    kind: FeatureKind
    is_list: bool
    is_text: bool

    def value(self, name: str, feature: Feature | None) -> Any:
        """Return the column's value for one sample; None if the sample lacks the feature.

        Raises:
            BadSampleError: unlike in the first samples, the feature has another kind, several values, or bytes that
                are not UTF-8.
        """
        if feature is None:
            return None
        if feature.kind != self.kind:
            raise BadSampleError(f"feature {name!r} holds {feature.kind}; the first samples have {self.kind}")
        try:
            values: Any = [value.decode() for value in feature.values] if self.is_text else feature.values
        except UnicodeDecodeError as error:
            raise BadSampleError(f"feature {name!r} is not UTF-8, unlike in the first samples: {error}") from error
        if self.is_list:
            return values
        if len(values) > 1:
            raise BadSampleError(
                f"feature {name!r} has {count_text(len(values), 'value')}; the first samples have one"
            )
        return values[0] if len(values) else None


def choose_columns(
    examples: Sequence[Mapping[str, Feature]], key: str | None
) -> tuple[dict[str, FeatureColumn], pa.Schema]:
    """Return the column for each feature, and the schema, from the first samples of a source, at least one.

    A column is a list if some sample has several values, and text if the bytes of all samples are UTF-8. `key` is the
    feature or column that holds the keys; None: the feature `key`, if any.

    Raises:
        ConfigError: a feature is of two kinds, two columns would have the same name, or `key` is not a feature of
            text or integers.
    """
    names = list(dict.fromkeys(name for example in examples for name in example))
    inferred = {}
    for name in names:
        inferred[name] = _infer_column(name, [example[name] for example in examples if name in example])
    # The name that loaders expect for a feature, unless another feature has that name already.
    usual = {name: _USUAL_NAMES.get(name, name) for name in names}
    renamed = {name: name if usual[name] in names else usual[name] for name in names}
    arrays = {
        renamed[name]: pa.array([column.value(name, example.get(name)) for example in examples], _arrow_type(column))
        for name, column in inferred.items()
    }
    first_samples = pa.table(arrays)
    # `key` is the name of a feature or of its renamed column. If it is neither, `ColumnMap` raises an error.
    key_column = None if key is None else renamed.get(key, key)
    columns = ColumnMap(first_samples.schema, first_samples, key=key_column)
    chosen = {}
    final_names = iter(columns.schema.names[1:])  # without the key; in the order of the raw columns
    for name, column in inferred.items():
        final_name = None if renamed[name] == columns.key else next(final_names)
        chosen[name] = replace(column, column=final_name)
    return chosen, columns.schema


def _infer_column(name: str, features: Sequence[Feature]) -> FeatureColumn:
    """Return the column for these values of one feature. It has the feature's name; `choose_columns` renames it."""
    kinds = sorted({feature.kind for feature in features})
    if len(kinds) > 1:
        raise ConfigError(
            f"feature {name!r} holds {kinds[0]} in some samples and {kinds[1]} in others; give it one type"
        )
    # Only bytes can be text.
    values = [value for feature in features for value in feature.values] if kinds[0] == "bytes" else []
    is_list = any(len(feature.values) > 1 for feature in features)
    return FeatureColumn(name, kinds[0], is_list, bool(values) and all(map(_is_text, values)))


def _arrow_type(column: FeatureColumn) -> pa.DataType:
    types = {
        "float": pa.float32(),
        "int64": pa.int64(),
        "bytes": pa.string() if column.is_text else pa.large_binary(),
    }
    return pa.list_(types[column.kind]) if column.is_list else types[column.kind]


def _is_text(value: bytes) -> bool:
    """Return whether `value` is UTF-8 without NUL bytes. NUL bytes are valid UTF-8, but a sign of binary data."""
    try:
        return "\0" not in value.decode()
    except UnicodeDecodeError:
        return False


def _messages(message: bytes | memoryview, message_type: str) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of the fields of a message that has only messages, strings and bytes."""
    for number, _, value in read_fields(message):
        if not isinstance(value, memoryview):
            raise BadSampleError(f"not a valid {message_type}: field {number} is a number")
        yield number, value


def _feature_name(raw: memoryview) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise BadSampleError(f"the name of a feature is not UTF-8: {bytes(raw)!r}") from error


def _parse_feature(message: memoryview) -> Feature | None:
    feature = None
    for number, value in _messages(message, "Feature"):
        if number not in _KINDS:
            raise BadSampleError(f"not a valid Feature: it has a field {number}")
        feature = Feature(_KINDS[number], _PARSERS[_KINDS[number]](value))  # in a protobuf oneof, the last field wins
    return feature


def _parse_floats(message: memoryview) -> npt.NDArray[np.float32]:
    pieces = []
    for number, wire_type, value in read_fields(message):
        if number != 1 or wire_type not in (FIXED32, BYTES) or isinstance(value, int) or len(value) % 4:
            raise BadSampleError(f"not a valid FloatList: field {number} of wire type {wire_type}")
        pieces.append(value)
    return np.frombuffer(b"".join(pieces), "<f4")


def _parse_ints(message: memoryview) -> npt.NDArray[np.int64]:
    pieces: list[npt.NDArray[np.int64]] = []
    for number, wire_type, value in read_fields(message):
        if number == 1 and wire_type == VARINT and isinstance(value, int):
            pieces.append(np.array([to_signed(value)], np.int64))
        elif number == 1 and wire_type == BYTES and isinstance(value, memoryview):
            pieces.append(read_packed_varints(value))
        else:
            raise BadSampleError(f"not a valid Int64List: field {number} of wire type {wire_type}")
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


_PARSERS: Final[dict[FeatureKind, Any]] = {
    "bytes": lambda message: [bytes(value) for _, value in _messages(message, "BytesList")],
    "float": _parse_floats,
    "int64": _parse_ints,
}

"""Read Hugging Face features, for the Parquet, Arrow and Hugging Face sources.

Features describe each column by a JSON object. Its `_type` marks columns of images (`Image`), sounds (`Audio`),
videos (`Video`) and class indices (`ClassLabel`, with the class names). Features are in the metadata of a schema, or
in `dataset_info.json`. They are optional, so features that do not parse are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import LABEL

_METADATA: Final = b"huggingface"
_LABEL_COLUMNS: Final = (LABEL, "labels")  # usual names of the label column, by priority


def features_of(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the features by column in a schema's metadata; empty if there are none or they do not parse."""
    try:
        described = json.loads((schema.metadata or {}).get(_METADATA, b"{}"))
    except ValueError:
        return {}
    return features_in(described.get("info")) if isinstance(described, dict) else {}


def features_of_files(schemas: Iterable[tuple[str, pa.Schema]]) -> Mapping[str, Any]:
    """Return the features by column of the first of the files (name, raw schema) that has any; {} if none has.

    Raise ConfigError if two files number their classes differently.
    """
    first_name = ""
    first: Mapping[str, Any] = {}
    for name, schema in schemas:
        features = features_of(schema)
        if not features:
            continue
        if not first:
            first_name, first = name, features
        elif _classes(features) != _classes(first):
            raise ConfigError(
                f"the class names of {name} and {first_name} differ: {_classes(features)} and {_classes(first)}; "
                "the same label would mean different classes: ingest the files separately"
            )
    return first


def features_in(info: Any) -> Mapping[str, Any]:
    """Return the features by column of a parsed `dataset_info.json`."""
    features = info.get("features") if isinstance(info, dict) else None
    return features if isinstance(features, dict) else {}


def columns_of_media(features: Mapping[str, Any], schema: pa.Schema) -> dict[str, list[str]]:
    """Return the columns of `schema` that are declared as images, sounds and videos, by argument of `ColumnMap`."""
    kinds = {"images": "Image", "sounds": "Audio", "videos": "Video"}
    declared = {name: _kind(features.get(name)) for name in schema.names}
    return {media: [name for name in declared if declared[name] == kind] for media, kind in kinds.items()}


def label_column(features: Mapping[str, Any], schema: pa.Schema) -> tuple[str | None, tuple[str, ...]]:
    """Return the column that holds the class index, and the names of the classes.

    If several columns hold a class index, choose the one called `label` or `labels`, else the first. The others stay
    integer columns under their own names. Return (None, ()) if no column can be the label.
    """
    names = [name for name in schema.names if _kind(features.get(name)) == "ClassLabel"]
    names = [name for name in names if pa.types.is_integer(schema.field(name).type)]
    # An existing column `label` must not be replaced by another class column.
    if not names or (LABEL in schema.names and LABEL not in names):
        return None, ()
    chosen = next((name for name in _LABEL_COLUMNS if name in names), names[0])
    return chosen, _class_names(features[chosen].get("names"))


def _classes(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the class names of each column of class indices."""
    class_labels = {name: feature for name, feature in features.items() if _kind(feature) == "ClassLabel"}
    return {name: _class_names(feature.get("names")) for name, feature in class_labels.items()}


def _kind(feature: Any) -> str | None:
    """Return the type that a feature declares; None if it is a list or a nested structure."""
    return feature.get("_type") if isinstance(feature, dict) else None


def _class_names(names: Any) -> tuple[str, ...]:
    """Return the class names that a feature declares, in the order of their labels; () if they are not valid."""
    if isinstance(names, dict):  # as in the cards of hub data sets: {"0": "cat"}
        if not all(str(number).isdecimal() for number in names):
            return ()
        names = [names[number] for number in sorted(names, key=int)]
    return tuple(map(str, names)) if isinstance(names, list) else ()

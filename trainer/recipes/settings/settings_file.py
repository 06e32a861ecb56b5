"""Configuration files of the training program (`--config`): settings by the names of the fields of `TrainConfig`."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from datasvc.errors import ConfigError
from datasvc.trainer.launch.config_file import parse_file
from datasvc.trainer.recipes.settings.config import setting_types
from datasvc.trainer.recipes.settings.groups.setting_group import FieldType, naming

PRESET = "preset"
"""The only entry of a file that is no setting: the name of a preset."""


def read_settings(path: str) -> dict[str, Any]:
    """Return the settings of a file by field name, and with the key `PRESET` the name of a preset if it has one.

    The file is YAML, or JSON or TOML if its name ends with .json or .toml. Names may have dashes or underscores. The
    values have the types of their fields; ranges and choices are not checked.

    Raises:
        ConfigError: the file cannot be read; it has an unknown name, or a value of another type.
    """
    try:
        content = parse_file(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has a {type(content).__name__}; expected settings, each as 'name: value'")
    types_by_name = {**setting_types(), PRESET: FieldType(str)}
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in types_by_name:
            near = difflib.get_close_matches(name, types_by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "--help lists the settings; names have underscores here"
            raise ConfigError(f"{path} has a setting {key!r}, which does not exist; {hint}")
        if name in settings:
            raise ConfigError(f"{path} has the setting {name!r} twice; remove one of them")
        with naming(name, value):
            settings[name] = _convert(value, types_by_name[name], path)
    return settings


def format_yaml(name: str, value: Any, comment: str) -> str:
    """Return a line of a YAML file that `read_settings` reads back as the same value."""
    # A JSON value is a YAML value, so writing needs no PyYAML.
    return f"{name}: {json.dumps(value, ensure_ascii=False)}  # {comment}"


def _convert(value: Any, field_type: FieldType, path: str) -> Any:
    """Return a value of a file as the type of its field. Raises ConfigError: it has another type."""
    if value is None and field_type.is_optional:
        return None
    if field_type.is_words and isinstance(value, list):
        return " ".join(_convert_member(word, str, path) for word in value)
    if not field_type.is_tuple:
        return _convert_member(value, field_type.kind, path)
    # A single value stands for a list of one, as on the command line.
    members = value if isinstance(value, list) else [value]
    if field_type.length is not None and len(members) != field_type.length:
        raise ConfigError(f"expected a list of {field_type.length} values in {path}")
    return tuple(_convert_member(member, field_type.kind, path) for member in members)


def _convert_member(value: Any, kind: type, path: str) -> Any:
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1, which PyYAML reads, has 1e-4 as a string
        except ValueError:
            pass
    # A bool is an int in Python, so compare the classes.
    if type(value) is kind:
        return value
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
    hint = "; put it into quotes" if kind is str and not isinstance(value, list | dict | None) else ""
    raise ConfigError(f"expected {expected} in {path}{hint}")

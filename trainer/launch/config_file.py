"""horovodrun's configuration file: sections of settings, each the same as a flag; in YAML, JSON or TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# Where a setting's flag is not its own name in dashes.
_FLAGS = {
    ("autotune", "enabled"): "--autotune",
    ("stall-check", "enabled"): "--stall-check",
    ("logging", "level"): "--log-level",
    ("logging", "hide-timestamp"): "--log-hide-timestamp",
}
# The flags whose values are words of their own; other lists are one word with commas.
_OF_SEVERAL_WORDS = frozenset({"--blacklist-cooldown-range"})
# The key "controller" has one of these: each is a flag of its own.
_CONTROLLERS = ("gloo", "mpi")
_PREFIXES = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "",
    "elastic": "",
}


def read_config_file(path: Path, switches: Collection[str]) -> list[str]:
    """The command line that a configuration file stands for.

    `.json` and `.toml` are read as such, everything else as YAML, for which PyYAML must be installed. Names have
    underscores or dashes.

    Args:
        path: of the file.
        switches: the flags without a value that the command line has.

    Raises:
        ValueError: it cannot be read or does not hold sections of settings.
    """
    try:
        content = _parse(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(content, Mapping):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not the caller
            f"{path} must hold sections such as params, not {type(content).__name__}"
        )
    return list(_list_arguments(content, path, switches))


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    try:
        import yaml  # type: ignore[import-untyped]  # has no types of its own
    except ImportError:
        raise ValueError(
            f"reading {path} as YAML needs PyYAML: pip install pyyaml, or write it as .json or .toml"
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _list_arguments(content: Mapping[str, Any], path: Path, switches: Collection[str]) -> Iterator[str]:
    for key, settings in content.items():
        section = _dashed(key)
        if section == "controller":
            if str(settings).lower() not in _CONTROLLERS:
                raise ValueError(f"{path}: the controller must be {' or '.join(_CONTROLLERS)}, not {settings!r}")
            yield f"--{str(settings).lower()}"
        elif not isinstance(settings, Mapping):
            yield from _argument(f"--{section}", settings, path, switches)
        elif section not in _PREFIXES:
            raise ValueError(f"{path} has a section {key}; known are {', '.join(_PREFIXES)}")
        else:
            for name, value in settings.items():
                flag = _FLAGS.get((section, _dashed(name)), f"--{_PREFIXES[section]}{_dashed(name)}")
                yield from _argument(flag, value, path, switches)


def _argument(flag: str, value: object, path: Path, switches: Collection[str]) -> Iterator[str]:
    if value is True:
        yield flag
    elif value is False:
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        # A switch without an opposite is off anyway. A flag that is no switch is the parser's to refuse.
        if opposite in switches or flag not in switches:
            yield opposite
    elif isinstance(value, list):
        words = [str(part) for part in value]
        yield from (flag, *words) if flag in _OF_SEVERAL_WORDS else (f"{flag}={','.join(words)}",)
    elif isinstance(value, str | int | float):
        yield f"{flag}={value}"
    elif value is not None:
        raise ValueError(f"{path}: the value of {flag[2:]} must be a number, a text or a switch, not {value!r}")


def _dashed(name: object) -> str:
    return str(name).replace("_", "-")

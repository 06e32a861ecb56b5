"""horovodrun's configuration file: sections of settings, each the same as a flag; in YAML, JSON or TOML."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Where a setting's flag is not its own name in dashes: (section, setting) -> flag for true or a value, for false.
_FLAGS: dict[tuple[str, str], tuple[str, str | None]] = {
    ("autotune", "enabled"): ("--autotune", "--no-autotune"),
    ("stall_check", "enabled"): ("--stall-check", "--no-stall-check"),
    ("logging", "level"): ("--log-level", None),
    ("logging", "hide_timestamp"): ("--log-hide-timestamp", None),
}
_PREFIXES = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "",
    "elastic": "",
}


def read_config_file(path: Path) -> list[str]:
    """The command line that a configuration file stands for.

    ``.json`` and ``.toml`` are read as such, everything else as YAML, for which PyYAML must be installed.

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
    return list(_list_arguments(content, path))


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


def _list_arguments(content: Mapping[str, Any], path: Path) -> Iterator[str]:
    for section, settings in content.items():
        if not isinstance(settings, Mapping):
            yield from _argument(f"--{_dashed(section)}", f"--no-{_dashed(section)}", settings, path)
            continue
        if section not in _PREFIXES:
            raise ValueError(f"{path} has a section {section}; known are {', '.join(_PREFIXES)}")
        for name, value in settings.items():
            flag = f"--{_PREFIXES[section]}{_dashed(name)}"
            yes, no = _FLAGS.get((section, name), (flag, f"--no-{flag[2:]}"))
            yield from _argument(yes, no, value, path)


def _argument(yes: str, no: str | None, value: object, path: Path) -> Iterator[str]:
    if value is True:
        yield yes
    elif value is False:
        if no is not None:
            yield no
    elif isinstance(value, list):
        yield from (yes, *map(str, value))
    elif isinstance(value, str | int | float):
        yield f"{yes}={value}"
    elif value is not None:
        raise ValueError(f"{path}: the value of {yes[2:]} must be a number, a text or a switch, not {value!r}")


def _dashed(name: object) -> str:
    return str(name).replace("_", "-")

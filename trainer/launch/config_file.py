"""Converts horovodrun's configuration file (`--config-file`) to flags of the launcher's command line.

The file is YAML, JSON or TOML and has sections of settings. For example, `warning-time-seconds: 60` in the section
`stall-check` is `--stall-check-warning-time-seconds=60`.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

# A regular flag is "--", the prefix of the section (`_PREFIXES`), and the name of the setting. These are the others.
_IRREGULAR_FLAGS = {
    ("autotune", "enabled"): "--autotune",
    ("stall-check", "enabled"): "--stall-check",
    ("logging", "level"): "--log-level",
    ("logging", "hide-timestamp"): "--log-hide-timestamp",
}
# Flags that take several arguments; a list for any other flag becomes one argument with commas.
_MULTI_ARGUMENT_FLAGS = frozenset({"--blacklist-cooldown-range"})
# The values of the key "controller"; each is also the name of a flag.
_CONTROLLERS = ("gloo", "mpi")
_OCTAL: Final = re.compile("[-+]?0[0-7_]+")
# The sections, and the prefix of the flags of their settings, after "--".
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
    """Return the command-line arguments that are equivalent to a configuration file.

    Files other than `.json` and `.toml` are read as YAML, which needs PyYAML. Names may have underscores or dashes.
    `switches` are the flags of the command line that take no value.

    Raises:
        ValueError: the file cannot be read, or does not contain sections of settings.
    """
    content = parse_file(path)
    if not isinstance(content, Mapping):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not the caller
            f"{path} must contain sections such as params, not a {type(content).__name__}"
        )
    return list(_list_arguments(content, path, switches))


def parse_file(path: Path) -> Any:
    """Return the content of a file that is YAML, or JSON or TOML by its suffix; {} if a YAML file is empty.

    Raises:
        ValueError: the file cannot be read, is not of this format, or has a setting twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique_entries)
        if path.suffix == ".toml":
            return tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    try:
        import yaml  # type: ignore[import-untyped]  # has no type information
    except ImportError:
        raise ValueError(
            f"reading {path} as YAML needs PyYAML: pip install pyyaml, or write it as .json or .toml"
        ) from None
    try:
        # YAML reads an empty file as None; it is a file without settings.
        return yaml.load(text, _unique_key_loader()) or {}  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _unique_entries(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of a JSON object. Raises ValueError: it has a name twice."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        _check_new(name, entries)
        entries[name] = value
    return entries


def _unique_key_loader() -> type[Any]:
    """Return a safe YAML loader that refuses a mapping with a name twice by a ValueError."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]  # has no type information
        # Before the merge key "<<" is resolved: the entries that it merges may be given again.
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    _check_new(key.value, names)
                    names.add(key.value)
            return node

    def construct(loader: UniqueKeyLoader, node: yaml.ScalarNode) -> Any:
        # YAML 1.1 reads 010 as 8 and 1:30 as 90, which nobody means in a file of settings; YAML 1.2 does not.
        if base := "60" if ":" in node.value else "8" if _OCTAL.fullmatch(node.value) else "":
            raise ValueError(
                f"YAML reads {node.value} as a number of base {base}; write a decimal number, or a text in quotes"
            )
        return super(UniqueKeyLoader, loader).yaml_constructors[node.tag](loader, node)

    for kind in ("int", "float"):
        UniqueKeyLoader.add_constructor(f"tag:yaml.org,2002:{kind}", construct)
    return UniqueKeyLoader


def _check_new(name: str, names: Collection[str]) -> None:
    if name in names:
        raise ValueError(f"it has {name!r} twice; remove one of them")


def _list_arguments(content: Mapping[str, Any], path: Path, switches: Collection[str]) -> Iterator[str]:
    """Yield the command-line arguments for the content of the file."""
    for key, settings in content.items():
        section = _dashed(key)
        if section == "controller":
            if str(settings).lower() not in _CONTROLLERS:
                raise ValueError(f"{path}: the controller must be {' or '.join(_CONTROLLERS)}, not {settings!r}")
            yield f"--{str(settings).lower()}"
        elif not isinstance(settings, Mapping):
            # A setting outside of all sections.
            yield from _argument(f"--{section}", settings, path, switches)
        elif section not in _PREFIXES:
            raise ValueError(f"{path} has an unknown section {key}; valid are {', '.join(_PREFIXES)}")
        else:
            for name, value in settings.items():
                flag = _IRREGULAR_FLAGS.get((section, _dashed(name)), f"--{_PREFIXES[section]}{_dashed(name)}")
                yield from _argument(flag, value, path, switches)


def _argument(flag: str, value: object, path: Path, switches: Collection[str]) -> Iterator[str]:
    """Yield the command-line arguments for one setting; none if it needs none."""
    if value is True:
        yield flag
    elif value is False:
        name = flag.removeprefix("--")
        opposite = f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"
        # A switch without an opposite is off by default, so it needs no argument. For a flag with a value, False is a
        # mistake: the parser does not know the opposite either, and reports the error.
        if opposite in switches or flag not in switches:
            yield opposite
    elif isinstance(value, list):
        texts = [str(entry) for entry in value]
        if flag in _MULTI_ARGUMENT_FLAGS:
            yield from (flag, *texts)
        else:
            yield f"{flag}={','.join(texts)}"
    elif isinstance(value, str | int | float):
        yield f"{flag}={value}"
    elif value is not None:  # None, a setting without a value, yields no argument
        raise ValueError(
            f"{path}: the value of {flag[2:]} must be a number, a string, a list, true or false, not {value!r}"
        )


def _dashed(name: object) -> str:
    return str(name).replace("_", "-")


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line and a hint at `--help`, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake on standard error and exit with status 2."""
        # The message quotes arguments, which may contain newlines.
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

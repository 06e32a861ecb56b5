"""The command line of the training program: options override a preset, which overrides the defaults of `TrainConfig`.

The variables `DATASVC_REPO`, `DATASVC_CACHE` and `DATASVC_PEERS` stand for options that are not given. With
`--cache ''` and `--peers ''` there is no cache and there are no peers, whatever the variables say.

The options and their help texts are made from the fields and the docstrings of the groups of `TrainConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.trainer.launch.one_line_parser import OneLineParser
from datasvc.trainer.recipes.settings.config import TrainConfig, setting_fields, setting_groups
from datasvc.trainer.recipes.settings.groups.setting_group import FieldType, SettingGroup, field_types
from datasvc.trainer.recipes.settings.presets import PRESETS, find_preset

_REQUIRED = dataclasses.MISSING
# The variables that also count for the other commands of datasvc, by the setting that they give.
_VARIABLES: Final = {"repo": "DATASVC_REPO", "cache": "DATASVC_CACHE", "peers": "DATASVC_PEERS"}


@dataclass(frozen=True)
class Setting:
    """The value of one setting.

    Attributes:
        value: value of the setting; `dataclasses.MISSING` if it is required and not given.
        source: "default", "command line", "required", "variable" with the name of an environment variable, or the
            preset with the section of its paper.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class Options:
    """A parsed command line.

    Attributes:
        settings: settings by field name of `TrainConfig`, in the order of its fields.
        preset: name of the preset; None without one.
        show_config: whether to print the settings instead of training.
    """

    settings: Mapping[str, Setting]
    preset: str | None
    show_config: bool

    @property
    def missing(self) -> list[str]:
        """The required options that are not given."""
        return [_option(name) for name, setting in self.settings.items() if setting.value is _REQUIRED]

    def config(self) -> TrainConfig:
        """Return the settings of the run. Raises ConfigError: a value is out of range."""
        return TrainConfig(**{name: setting.value for name, setting in self.settings.items()})

    def describe(self) -> str:
        """Return one line per setting with name, value and source, by group, below the citation of the preset."""
        rows = {name: (_format(setting.value), setting.source) for name, setting in self.settings.items()}
        name_width, value_width = max(map(len, rows)), max(len(value) for value, _ in rows.values())
        lines = []
        for group in setting_groups():
            lines += ["", f"# {group.title}"]
            for field in dataclasses.fields(group):
                value, source = rows[field.name]
                lines.append(f"{field.name:<{name_width}}  {value:<{value_width}}  {source}")
        if self.preset is None:
            return "\n".join(lines[1:])  # without the empty line above the first group
        preset = find_preset(self.preset)
        differs = [f"# differs from the paper: {preset.differs}"] if preset.differs else []
        return "\n".join([f"# {self.preset}: {preset.citation}", *differs, *lines])


def parse_options(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "python -m datasvc.trainer",
    environ: Mapping[str, str] | None = None,
) -> Options:
    """Parse a command line. It has one option per field of `TrainConfig`, `--preset` and `--show-config`.

    Exits the process with a message of one line if the command line is not valid or a required option is missing.

    Args:
        arguments: arguments of the command line; None for those of this process.
        prog: name of the program in usage messages.
        environ: environment variables; None for those of this process.

    Raises:
        ConfigError: there is no such preset.
    """
    environ = os.environ if environ is None else environ
    parser = _make_parser(prog)
    given = vars(parser.parse_args(arguments))
    # Options that are not given are absent (SUPPRESS), so that a preset can set them.
    preset_name, show_config = given.pop("preset", None), given.pop("show_config", False)
    choices = {} if preset_name is None else find_preset(preset_name).choices
    settings = {}
    for field in setting_fields():
        if field.name in given:
            value = given[field.name]
            setting = Setting(tuple(value) if isinstance(value, list) else value, "command line")
        elif field.name in choices:
            choice = choices[field.name]
            setting = Setting(choice.value, f"preset {preset_name}: {choice.source}")
        elif value := environ.get(_VARIABLES.get(field.name, "")):
            setting = Setting(value, f"variable {_VARIABLES[field.name]}")
        else:
            setting = Setting(field.default, "required" if field.default is _REQUIRED else "default")
        settings[field.name] = setting
    if "batch_size" in given and "global_batch" not in given:
        # Remove the global batch of a preset, because it would override the user's --batch-size.
        settings["global_batch"] = Setting(None, "command line: --batch-size replaces it")
    for name in ("cache", "peers"):
        if settings[name].value == "":
            # Given empty, so that the variable does not count.
            settings[name] = Setting(None, "command line")
    if "peers" not in given and settings["cache"].value is None:
        # The variable may be set for all commands of a node: without a cache, peers are ignored, and are no error.
        settings["peers"] = Setting(None, "default")
    options = Options(settings, preset_name, show_config)
    # With `--show-config` this is no error: missing options are shown as "?".
    if options.missing and not show_config:
        hint = f"; {_VARIABLES['repo']} may stand for --repo" if "--repo" in options.missing else ""
        parser.error(f"the following arguments are required: {', '.join(options.missing)}{hint}")
    return options


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        usage="%(prog)s --data NAME@VERSION --repo URL --name NAME [--preset NAME] [OPTION ...]",
        description="Train a model on this rank. Several ranks: datasvc-run -np 2 python -m datasvc.trainer ...",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--preset", metavar="NAME", help=f"start from a published recipe: {', '.join(PRESETS)}")
    parser.add_argument("--show-config", action="store_true", help="print every setting with its source, and exit")
    for group in setting_groups():
        _add_group(parser, group)
    return parser


def _add_group(parser: argparse.ArgumentParser, group: type[SettingGroup]) -> None:
    """Add the options of a group of settings as a section of `--help`."""
    section = parser.add_argument_group(group.title)
    helps, types_by_name = _read_helps(group), field_types(group)
    for field in dataclasses.fields(group):
        text = helps[field.name]
        if field.default is not _REQUIRED:
            text += f" (default: {_format_default(field.default)})"
        if field.name in _VARIABLES:
            text += f" (variable: {_VARIABLES[field.name]})"
        section.add_argument(
            _option(field.name), help=text.replace("%", "%%"), **_parse_as(types_by_name[field.name])
        )


def _parse_as(field_type: FieldType) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field of a type."""
    if field_type.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    # The choices are shown here and checked by `TrainConfig`, which also gets values that are no options.
    metavar = f"{{{','.join(field_type.choices)}}}" if field_type.choices else field_type.metavar
    if not field_type.is_tuple:
        return {"type": field_type.kind, "metavar": metavar}
    if field_type.length is None:
        return {"type": field_type.kind, "metavar": metavar, "nargs": "*"}
    return {"type": field_type.kind, "metavar": tuple(metavar.split()), "nargs": field_type.length}


def _read_helps(group: type[SettingGroup]) -> dict[str, str]:
    """Return the help text of each option of a group, from its docstring."""
    docstring = inspect.getdoc(group) or ""
    attributes = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    # A field name, and its text with continuation lines, which are indented further.
    entries = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _format_default(value: Any) -> str:
    match value:
        case None | ():
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return " ".join(map(_format_default, value))
        case float():
            return f"{value:.6g}"
    return str(value)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _format(value: Any) -> str:
    if value is _REQUIRED:
        return "?"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

"""The command line of the training program.

A setting is taken from the first of these that has it: an option, the file of `--config`, a preset, a variable, the
default of `TrainConfig`. The variables are `DATASVC_REPO`, `DATASVC_CACHE` and `DATASVC_PEERS`. With `--cache ''` and
`--peers ''` there is no cache and there are no peers, whatever the file and the variables have.

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
from typing import Any, Final, Literal

from datasvc.trainer.launch.config_file import OneLineParser
from datasvc.trainer.recipes.settings.config import TrainConfig, setting_fields, setting_groups, setting_types
from datasvc.trainer.recipes.settings.groups.setting_group import FieldType, SettingGroup, field_types
from datasvc.trainer.recipes.settings.presets import PRESET, PRESETS, find_preset, format_yaml, read_settings

_REQUIRED = dataclasses.MISSING
# Environment variables by setting. The other commands of datasvc read the same ones.
_VARIABLES: Final = {"repo": "DATASVC_REPO", "cache": "DATASVC_CACHE", "peers": "DATASVC_PEERS"}


@dataclass(frozen=True)
class Setting:
    """The value of one setting.

    Attributes:
        value: value of the setting; `dataclasses.MISSING` if it is required and not given.
        source: "default", "command line", "required", "file" with its path, "variable" with the name of an
            environment variable, or the preset with the section of its paper.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class Options:
    """A parsed command line.

    Attributes:
        settings: settings by field name of `TrainConfig`, in the order of its fields.
        preset: name of the preset; None without one.
        show_config: form in which to print the settings instead of training; None: train.
    """

    settings: Mapping[str, Setting]
    preset: str | None
    show_config: Literal["table", "yaml"] | None

    @property
    def missing(self) -> list[str]:
        """The required options that are not given."""
        return [_option(name) for name, setting in self.settings.items() if setting.value is _REQUIRED]

    def config(self) -> TrainConfig:
        """Return the settings of the run. Raises ConfigError: a value is out of range."""
        return TrainConfig(**{name: setting.value for name, setting in self.settings.items()})

    def describe(self) -> str:
        """Return one line per setting with name, value and source, by group, below the citation of the preset.

        With `show_config="yaml"` it is a file that `--config` reads back.
        """
        rows = {name: (_format(setting.value), setting.source) for name, setting in self.settings.items()}
        name_width, value_width = max(map(len, rows)), max(len(value) for value, _ in rows.values())
        lines = []
        if self.preset is not None:
            preset = find_preset(self.preset)
            lines.append(f"# {self.preset}: {preset.citation}")
            lines += [f"# differs from the paper: {preset.differs}"] if preset.differs else []
        for group in setting_groups():
            lines += ["", f"# {group.title}"] if lines else [f"# {group.title}"]
            for field in dataclasses.fields(group):
                value, source = rows[field.name]
                if self.show_config != "yaml":
                    lines.append(f"{field.name:<{name_width}}  {value:<{value_width}}  {source}")
                elif self.settings[field.name].value is _REQUIRED:
                    lines.append(f"# {field.name}: {source}")
                else:
                    lines.append(format_yaml(field.name, self.settings[field.name].value, source))
        return "\n".join(lines)


def parse_options(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "python -m datasvc.trainer",
    environ: Mapping[str, str] | None = None,
) -> Options:
    """Parse a command line. It has one option per field of `TrainConfig`, `--config`, `--preset` and `--show-config`.

    Exits the process with a message of one line if the command line is not valid or a required option is missing.

    Args:
        arguments: arguments of the command line; None for those of this process.
        prog: name of the program in usage messages.
        environ: environment variables; None for those of this process.

    Raises:
        ConfigError: there is no such preset, or the file of `--config` cannot be read.
    """
    environ = os.environ if environ is None else environ
    parser = _make_parser(prog)
    # Options that are not given are absent (SUPPRESS), so that the sources below can set them.
    given = {name: _as_setting(name, value) for name, value in vars(parser.parse_args(arguments)).items()}
    path, show_config = given.pop("config", None), given.pop("show_config", None)
    written = {} if path is None else read_settings(path)
    preset_name = given.pop(PRESET, written.pop(PRESET, None))
    sources = [
        {name: Setting(value, "command line") for name, value in given.items()},
        {name: Setting(value, f"file {path}") for name, value in written.items()},
        _settings_of_preset(preset_name),
        _settings_of_variables(environ),
        {
            field.name: Setting(field.default, "required" if field.default is _REQUIRED else "default")
            for field in setting_fields()
        },
    ]
    names = [field.name for field in setting_fields()]
    places = {name: next(place for place, source in enumerate(sources) if name in source) for name in names}
    settings = {name: sources[place][name] for name, place in places.items()}
    batch_source = next((source for source in sources[:2] if source.keys() & {"batch_size", "global_batch"}), {})
    if "batch_size" in batch_source and "global_batch" not in batch_source:
        # Remove the global batch of the file or the preset, because it would override this batch size.
        settings["global_batch"] = Setting(None, f"{settings['batch_size'].source}: --batch-size replaces it")
    if settings["statistics"].value == "average" and places["statistics"] < places["statistics_batches"]:
        # The number of batches belongs to the setting of the file or the preset that is overridden.
        settings["statistics_batches"] = sources[-1]["statistics_batches"]
    for name in ("cache", "peers", "cache_budget"):
        if settings[name].value == "":
            # Given empty, so that neither the file nor the variable counts.
            settings[name] = Setting(None, settings[name].source)
    if settings["peers"].source.startswith("variable") and settings["cache"].value is None:
        # The variable may be set for all commands of a node: without a cache, peers are ignored, and are no error.
        settings["peers"] = Setting(None, "default")
    options = Options(settings, preset_name, show_config)
    # With `--show-config` this is no error: missing options are shown as "?".
    if options.missing and not show_config:
        hint = f"; {_VARIABLES['repo']} may stand for --repo" if "--repo" in options.missing else ""
        parser.error(f"the following arguments are required: {', '.join(options.missing)}{hint}")
    return options


def _settings_of_preset(name: str | None) -> dict[str, Setting]:
    choices = {} if name is None else find_preset(name).choices
    return {field: Setting(choice.value, f"preset {name}: {choice.source}") for field, choice in choices.items()}


def _settings_of_variables(environ: Mapping[str, str]) -> dict[str, Setting]:
    # An empty variable is one that is not set.
    return {
        name: Setting(environ[variable], f"variable {variable}")
        for name, variable in _VARIABLES.items()
        if environ.get(variable)
    }


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        usage="%(prog)s --data NAME@VERSION --repo URL --name NAME [--preset NAME] [OPTION ...]",
        description=f"Train a model on this rank. Several ranks: datasvc-run -np 2 {prog} ...",
        argument_default=argparse.SUPPRESS,
        # Else a typing error, such as `--stop-on`, is the option that begins in this way.
        allow_abbrev=False,
    )
    parser.add_argument("--preset", metavar="NAME", help=f"start from a published recipe: {', '.join(PRESETS)}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings by name, as YAML, .json or .toml; options override them, and they override the preset",
    )
    parser.add_argument(
        "--show-config",
        nargs="?",
        const="table",
        choices=("table", "yaml"),
        help="print every setting with its source, and exit; yaml: in a form that --config reads",
    )
    for group in setting_groups():
        _add_group(parser, group)
    return parser


def _add_group(parser: argparse.ArgumentParser, group: type[SettingGroup]) -> None:
    """Add the options of a group of settings as a section of `--help`."""
    section = parser.add_argument_group(group.title)
    helps, types_by_name = _read_helps(group), field_types(group)
    for field in dataclasses.fields(group):
        text = helps[field.name]
        if field.default not in {_REQUIRED, None}:
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
    if field_type.is_words:
        return {"type": str, "metavar": metavar, "nargs": "+", "action": _AllAtOnce}
    if not field_type.is_tuple:
        return {"type": field_type.kind, "metavar": metavar}
    if field_type.length is None:
        return {"type": field_type.kind, "metavar": metavar, "nargs": "*", "action": _AllAtOnce}
    return {"type": field_type.kind, "metavar": tuple(metavar.split()), "nargs": field_type.length}


class _AllAtOnce(argparse.Action):
    """Stores all values of an option; the second of two equal options is an error, and does not replace the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"argument {option}: given twice; give all of its values after one {option}")
        setattr(namespace, self.dest, values)


def _read_helps(group: type[SettingGroup]) -> dict[str, str]:
    """Return the help text of each option of a group, from its docstring."""
    docstring = inspect.getdoc(group) or ""
    attributes = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    # A field name, and its text with continuation lines, which are indented further.
    entries = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", attributes, flags=re.MULTILINE)
    return {name: _in_words_of_options(" ".join(text.split())) for name, text in entries}


def _in_words_of_options(text: str) -> str:
    """Return a docstring's text for people at a prompt: `epochs` is `--epochs`, and None is an option not given."""
    text = re.sub(r"[;,] see `[A-Z]\w*`", "", text)  # classes are in the reference of Python names
    names = {field.name for field in setting_fields()}

    def spell(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        return match[0] if name not in names else _option(name) + (f" {value}" if value else "")

    text = re.sub(r"`(\w+)(?:=([^`]+))?`", spell, text)
    return re.sub(
        r"(^|[.] )?\bNone\b", lambda match: f"{match[1]}Not given" if match[1] is not None else "not given", text
    )


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


def _as_setting(name: str, value: Any) -> Any:
    """Return what argparse has parsed as the value of a setting."""
    if not isinstance(value, list):
        return value
    return " ".join(value) if setting_types()[name].is_words else tuple(value)


def _format(value: Any) -> str:
    if value is _REQUIRED:
        return "?"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

"""The command line: what it says, over what a preset says, over the defaults; and where each value comes from."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.presets import PRESETS, find_preset

_REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Setting:
    """One value of a run.

    Attributes:
        value: `dataclasses.MISSING` where it must be given and is not.
        source: where it comes from: "default", "command line", or the preset with its place in the paper.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class Options:
    """A command line, understood.

    Attributes:
        settings: by the names of `TrainConfig`'s fields, in their order.
        preset: name of one; None: none.
        show_config: the settings are to be printed, and nothing run.
    """

    settings: Mapping[str, Setting]
    preset: str | None
    show_config: bool

    @property
    def missing(self) -> list[str]:
        """The options that must be given and are not."""
        return [_option(name) for name, setting in self.settings.items() if setting.value is _REQUIRED]

    def config(self) -> TrainConfig:
        """Return the settings of the run. Raises ConfigError."""
        return TrainConfig(**{name: setting.value for name, setting in self.settings.items()})

    def describe(self) -> str:
        """Return a line for each setting: name, value, source; the preset's citation above them."""
        rows = [(name, _say(setting.value), setting.source) for name, setting in self.settings.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]
        if self.preset is not None:
            preset = find_preset(self.preset)
            lines.insert(0, f"# {self.preset}: {preset.citation}")
            if preset.differs:
                lines.insert(1, f"# differs from the paper: {preset.differs}")
        return "\n".join(lines)


def parse_options(arguments: Sequence[str] | None = None, *, prog: str = "python -m datasvc.trainer") -> Options:
    """Return what a command line says: one option for each field of `TrainConfig`, and those that choose among them.

    Ends the process with a usage message where it is none, or a required option is missing.

    Raises:
        ConfigError: no such preset.
    """
    parser = _make_parser(prog)
    given = vars(parser.parse_args(arguments))
    preset_name, show_config = given.pop("preset", None), given.pop("show_config", False)
    choices = {} if preset_name is None else find_preset(preset_name).choices
    settings = {}
    for field in dataclasses.fields(TrainConfig):
        if field.name in given:
            value = given[field.name]
            setting = Setting(tuple(value) if isinstance(value, list) else value, "command line")
        elif field.name in choices:
            choice = choices[field.name]
            setting = Setting(choice.value, f"preset {preset_name}: {choice.source}")
        else:
            setting = Setting(field.default, "required" if field.default is _REQUIRED else "default")
        settings[field.name] = setting
    _yield_to_command_line(settings, given)
    options = Options(settings, preset_name, show_config)
    if options.missing and not show_config:
        parser.error(f"the following arguments are required: {', '.join(options.missing)}")
    return options


def _yield_to_command_line(settings: dict[str, Setting], given: Mapping[str, Any]) -> None:
    """Let `--batch-size` win over a preset's global batch: it would have no effect otherwise."""
    if "batch_size" in given and "global_batch" not in given:
        settings["global_batch"] = Setting(None, "command line: --batch-size says it")


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run the training recipe on this rank. Several: datasvc-run -np 2 python -m datasvc.trainer ...",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--preset", metavar="NAME", help=f"start from a published recipe: {', '.join(PRESETS)}")
    parser.add_argument("--show-config", action="store_true", help="print every setting with its source, and exit")
    helps, kinds = _helps(), typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        said = (
            helps[field.name]
            if field.default in (_REQUIRED, None)
            else f"{helps[field.name]} [{_say(field.default)}]"
        )
        parser.add_argument(_option(field.name), help=said.replace("%", "%%"), **_how(kinds[field.name]))
    return parser


def _how(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a field of a type."""
    if isinstance(kind, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        of = typing.get_args(kind)
        if of[-1] is Ellipsis:
            return {"nargs": "*", "type": of[0], "metavar": "VALUE"}
        return {"nargs": len(of), "type": of[0], "metavar": "VALUE"}
    return {"type": kind, "metavar": "VALUE"}


def _helps() -> dict[str, str]:
    """Return what the class says of each of its attributes."""
    said = inspect.getdoc(TrainConfig) or ""
    attributes = said.partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _say(value: Any) -> str:
    if value is _REQUIRED:
        return "?"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

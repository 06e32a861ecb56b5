"""Options of commands, made from the parameters and docstrings of what the commands call.

The library is not imported for this, because Arrow and torch take longer than `--help` may take: the text of the one
function or class is found in its file and parsed.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection
from copy import copy
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import typer

from datasvc.cli.terminal.output import DryRunOption, MessageOption, WhereOption

F = TypeVar("F", bound=Callable[..., None])

_ROOT: Final = Path(__file__).parents[2]
_TYPES: Final = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "Path": Path,
    "Sequence": list,
    "Literal": Literal,
}
_SHARED: Final = {"message": MessageOption, "dry_run": DryRunOption, "where": WhereOption}
_NEXT = re.compile(r"^[^\s)]", re.MULTILINE)  # the first line of the next function or class
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n      .*)*)", re.MULTILINE)
_NONE = re.compile(r"; default: [^.;]*")
_VALUES = re.compile(r'^(\w+)(?:: Final)? = (Literal\[[^\]]*\]|\d+|"[^"]*")(?:  #.*)?$', re.MULTILINE)
_IMPORT = re.compile(r"^from datasvc\.([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)


def options_from(*owners: str, in_order: str | None = None, **changes: Any) -> Callable[[F], F]:
    """Give a command the options that its owners have and it has not; it gets their values as `**options`.

    Args:
        owners: functions, and dataclasses of settings, by module below `datasvc` and name: `shards.export.export`.
            What has a text in the docstring, and a type that can be typed, is an option.
        in_order: arguments and options of the command, in the order of its help. Without it, those of the owners come
            before the keyword-only parameters of the command.
        changes: typer's `Option` for an option that needs more than its name, type and text; None: it is no option.
    """

    def add(command: F) -> F:
        derived: Any = command
        derived.derive = lambda: _derive(command, owners, in_order, changes)
        # Without `**options`, which older releases of typer refuse: a list of commands needs no options.
        every = inspect.signature(command)
        own = [each for each in every.parameters.values() if each.kind is not each.VAR_KEYWORD]
        derived.__signature__ = every.replace(parameters=own)
        return command

    return add


def derive_options(app: typer.Typer) -> None:
    """Derive the options of all commands of a program or group; their names can be listed before."""
    for group in app.registered_groups:
        if group.typer_instance is not None:
            derive_options(group.typer_instance)
    for command in app.registered_commands:
        getattr(command.callback, "derive", list)()


def _derive(command: Any, owners: tuple[str, ...], in_order: str | None, changes: dict[str, Any]) -> None:
    if getattr(command, "is_derived", False):
        return
    del command.__signature__
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["options"]
    derived = {name: each for owner in reversed(owners) for name, each in read_parameters(owner).items()}
    parameters = {name: each for name, each in derived.items() if changes.get(name, name) is not None}
    for name, each in parameters.items():
        annotation = _SHARED.get(name)
        if annotation is None:
            # Without `--no-`, which an option that is off by default does not need.
            flag = [f"--{name.replace('_', '-')}"] if each.default is False else []
            option = copy(changes.get(name)) or typer.Option(*flag)
            option.help = option.help or each.annotation.__metadata__[0]
            annotation = Annotated[each.annotation.__origin__, option]
        parameters[name] = each.replace(annotation=annotation)
    last = [name for name, each in own.items() if each.kind is each.KEYWORD_ONLY]
    names = in_order.split() if in_order else [name for name in own | parameters if name not in last] + last
    shown = [(parameters | own)[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]
    command.__signature__ = inspect.Signature(shown)  # typer reads it
    command.is_derived = True


def read_parameters(owner: str) -> dict[str, inspect.Parameter]:
    """Return the possible options of a function or class; each has its type, annotated with its text, and default."""
    module, _, name = owner.rpartition(".")
    text = _read_text(module)
    start = max(text.find(f"\n{first_line}") for first_line in (f"class {name}:", f"def {name}(")) + 1
    assert start, f"{module} does not define {name}"
    end = _NEXT.search(text, start + 1)
    node: Any = ast.parse(text[start : end.start() if end else None]).body[0]
    if isinstance(node, ast.ClassDef):
        fields: Any = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        written = [(each.target.id, each.annotation, each.value) for each in fields]
    else:
        every, defaults = [*node.args.args, *node.args.kwonlyargs], [*node.args.defaults, *node.args.kw_defaults]
        defaults = [None] * (len(every) - len(defaults)) + defaults
        written = [(each.arg, each.annotation, value) for each, value in zip(every, defaults, strict=True)]
    options = {name for name, _, default in written if default is not None}
    helps = read_helps(ast.get_docstring(node) or "", options)
    names, parameters = _Names(module, _TYPES), {}
    for parameter, annotation, value in written:
        try:
            kind: Any = Annotated[names.evaluate(annotation), helps[parameter]]
            default = inspect.Parameter.empty if value is None else names.evaluate(value)
        except (KeyError, NameError):
            continue  # a value of Python, or one that the docstring of another function describes
        if default not in (None, inspect.Parameter.empty):
            # What None means to Python, which this option cannot have.
            kind = Annotated[kind.__origin__, _NONE.sub("", kind.__metadata__[0])]
        parameters[parameter] = inspect.Parameter(
            parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )
    return parameters


def read_helps(docstring: str, options: Collection[str]) -> dict[str, str]:
    """Return the texts of the sections `Args` and `Attributes` of a docstring, in the words of a command line."""
    entries = dict(_ENTRY.findall(docstring))
    return {
        name: _in_words_of_options(" ".join(text.split()), entries.keys(), options) for name, text in entries.items()
    }


def _in_words_of_options(text: str, names: Collection[str], options: Collection[str]) -> str:
    def spell(match: re.Match[str]) -> str:
        name = match[1]
        return f"--{name.replace('_', '-')}" if name in options else name.upper() if name in names else match[0]

    text = re.sub(r"[;,] see `[\w.]+`", "", text)  # classes are in the reference of Python names
    text = re.sub(r"[.;] None: ", "; default: ", re.sub(r"`(\w+)`", spell, text)).removeprefix("whether to ")
    return text[:1].upper() + text[1:]


class _Names(dict[str, Any]):
    """Types by name, and the choices and constants that a module defines or imports, such as `OnCommon`."""

    def __init__(self, module: str, types: dict[str, Any]) -> None:
        super().__init__(types)
        self.module = module

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression. Raise NameError if it needs other names."""
        return eval(compile(ast.Expression(node), self.module, "eval"), {}, self)  # noqa: S307 - our own source

    def __missing__(self, name: str) -> Any:
        text = _read_text(self.module)
        if value := dict(_VALUES.findall(text)).get(name):
            return self.evaluate(ast.parse(value, mode="eval").body)
        for module, names in _IMPORT.findall(text):
            if name in re.split(r"\W+", names):
                return _Names(module, _TYPES)[name]
        raise KeyError(name)


@cache
def _read_text(module: str) -> str:
    path = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.exists() else ""  # a package defines no choices

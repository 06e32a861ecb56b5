"""The options of every command, as its help shows them: names, types, defaults, variables and texts, in order."""

import os
from pathlib import Path

import typer

from datasvc.cli.main import make_app

GOLDEN = Path(__file__).with_name("options.txt")


def describe_commands(command, title="datasvc", section=None):
    """Yield the lines about a command or group: its section and help, its arguments, and then its options."""
    yield f"# {title}{f' [{section}]' if isinstance(section, str) else ''}"
    yield from (f"  {line}" for line in (command.help or "").splitlines())
    context = command.context_class(command, info_name=title)
    for kind in ("argument", "option"):
        for each in command.params:
            if each.param_type_name == kind:
                yield f"  {describe_parameter(each, context)}"
    for name, nested in getattr(command, "commands", {}).items():
        yield from describe_commands(nested, f"{title} {name}", getattr(nested, "rich_help_panel", None))


def describe_parameter(parameter, context):
    marks = ("required", "multiple", "hidden", "is_eager", "_custom_shell_complete")
    facts = [mark.strip("_") for mark in marks if getattr(parameter, mark, False)]
    default = getattr(parameter.default, "value", parameter.default)
    names, text = parameter.get_help_record(context) or (" ".join(parameter.opts), parameter.help)
    return f"{names} ({', '.join([repr(default), *facts])}) {' '.join(text.split())}"


def test_every_command_has_the_options_that_it_had():
    described = "".join(f"{line.rstrip()}\n" for line in describe_commands(typer.main.get_command(make_app())))
    assert described == GOLDEN.read_text().replace("{processors}", str(min(8, os.cpu_count() or 1)))


def leaves(command, title="datasvc"):
    for name, nested in getattr(command, "commands", {}).items():
        yield from leaves(nested, f"{title} {name}")
    if not hasattr(command, "commands"):
        yield title, command


def test_every_command_has_an_example_and_json():
    found = dict(leaves(typer.main.get_command(make_app())))
    assert [title for title, command in found.items() if f"Example: {title} " not in f"{command.help} "] == []
    without = {title for title, command in found.items() if not any("--json" in each.opts for each in command.params)}
    # The training program has options of its own, a report is one file, and a search prints each run as it ends.
    assert without == {"datasvc train", "datasvc plan layouts", "datasvc report", "datasvc bisect"}

"""`datasvc models tag`: list, move and remove tags of a model, and read their history."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.datasets.maintain import parse_duration
from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_table
from datasvc.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from datasvc.repository import Entry, Repository


def tag(
    ref: RefArgument,
    repo: RepoOption,
    name: Annotated[str | None, typer.Argument(metavar="TAG", help="Tag to move; without it, list the tags.")] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Move only if the tag points at this version; none: only if the tag is not set."
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag.")] = False,
    history: Annotated[bool, typer.Option("--history", help="List every move of the tag.")] = False,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Show the version at this time: 2026-11-21, yesterday, 36h ago."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Point TAG at a model version, optionally only if it points at an expected one; its history keeps all moves.

    Example: datasvc models tag digits-cnn@7 prod --expect 5 --repo ./repo

    In every command, NAME@TAG~1 is the version before the tag's newest move. Times are those of the writers' clocks.
    """
    from datasvc.repository import Repository
    from datasvc.repository.logs.references import parse_reference

    repository = Repository.open(repo)
    model = parse_reference(ref, "model").name
    if sum((remove, history, at is not None)) > 1 or (name is None and (remove or history or at or expect)):
        raise ConfigError("--remove, --history, --at and --expect need a tag; give a tag, and one of the first three")
    if name is None:
        _print_tags(repository, str(repository.resolve("models", ref, removed=True).name), as_json=as_json)
    elif history:
        _print_moves(_moves(repository, model, name), as_json=as_json)
    elif at is not None:
        _print_version_at(model, name, _moves(repository, model, name), parse_time(at), as_json=as_json)
    elif remove:
        repository.untag("models", model, name, expect=_expected(expect, model))
        _print_result(model, name, None, as_json=as_json)
    else:
        target = repository.tag("models", ref, name, expect=_expected(expect, model))
        _print_result(model, name, str(target), as_json=as_json)


def parse_time(text: str) -> datetime:
    """Parse "2026-11-21", "2026-11-21T08:00+01:00", "yesterday" or "36h ago".

    A day means its first instant; the default time zone is UTC.

    Raises:
        ConfigError: `text` is not a time.
    """
    age = text.strip().lower().removesuffix(" ago")
    if age == "yesterday":
        age = "24h"
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(age))
    except (ConfigError, OverflowError):
        pass  # not an age, but a day or a time
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a valid time; write for example 2026-11-21, 2026-11-21T08:00 or 36h ago"
        ) from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _expected(text: str | None, model: str) -> int | None:
    if text is None:
        return None
    if text == "none":
        return 0
    match = re.fullmatch(rf"(?:{re.escape(model)}@)?([0-9]{{1,18}})", text)
    if not match:
        raise ConfigError(f"--expect {text!r} is not a version of {model}; give a version number, or none")
    return int(match[1])


def _moves(repository: Repository, model: str, tag: str) -> list[Entry]:
    moves = repository.tag_history("models", model, tag)
    if not moves:
        tags = ", ".join(sorted(repository.tags("models", model))) or "none yet"
        raise NotFoundError(f"{model} never had a tag {tag!r}; it has: {tags}")
    return moves


def _print_tags(repository: Repository, model: str, *, as_json: bool) -> None:
    tags = repository.tags("models", model)
    if as_json:
        print_json(tags)
    else:
        print_table(("tag", "version"), [(tag, f"{model}@{version}") for tag, version in tags.items()])


def _print_moves(moves: list[Entry], *, as_json: bool) -> None:
    if as_json:
        print_json([dict(move.content) for move in moves])
        return
    rows = [
        (f"~{back}", move.content["version"] or "removed", move.content["created"])
        for back, move in enumerate(reversed(moves))
    ]
    print_table(("moves back", "version", "moved"), rows)


def _print_version_at(model: str, tag: str, moves: list[Entry], when: datetime, *, as_json: bool) -> None:
    from datasvc.repository.logs.tags import choose_move, version_of

    move = choose_move(moves, when)
    version = version_of(move) if move is not None else 0
    time = when.isoformat(timespec="seconds")
    if as_json:
        print_json({"tag": tag, "at": time, "version": f"{model}@{version}" if version else None})
    elif version:
        print_line(f"{model}@{tag} was {model}@{version} at {time}")
    else:
        raise NotFoundError(f"{model} had no tag {tag!r} at {time}; its first move was {moves[0].content['created']}")


def _print_result(model: str, tag: str, version: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"tag": tag, "version": version})
    else:
        print_line(f"{model}@{tag} is {version}" if version else f"removed {model}@{tag}; its history stays")

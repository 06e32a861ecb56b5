"""`datasvc tag`: list, move and remove tags, and read their history; `datasvc models tag` is the same for models."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.datasets.maintain import parse_duration
from datasvc.cli.terminal.output import JsonOption, RefArgument, RepoOption, print_json, print_result, print_table
from datasvc.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from datasvc.repository import Entry, Kind, Repository


TagArgument = Annotated[
    str | None, typer.Argument(metavar="TAG", help="Tag to set or move; without it, list the tags.")
]
ExpectOption = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION", help="Move only if the tag points at this version; none: only if the tag is not set."
    ),
]
RemoveOption = Annotated[
    bool, typer.Option("--remove", help="Remove the tag; with NAME@VERSION, only if it points at this version.")
]
HistoryOption = Annotated[bool, typer.Option("--history", help="List every move of the tag.")]
AtOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Show the version at this time: 2026-11-21, yesterday, 36h ago."),
]


def tag(
    ref: RefArgument,
    repo: RepoOption,
    name: TagArgument = None,
    expect: ExpectOption = None,
    remove: RemoveOption = False,
    history: HistoryOption = False,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point TAG at a data-set version, optionally only if it points at an expected one; its history keeps all moves.

    Example: datasvc tag pets@1 stable --repo ./repo

    In every command, NAME@TAG~1 is the version before the tag's newest move. Times are those of the writers' clocks.
    """
    run_tag("datasets", ref, repo, name, expect=expect, remove=remove, history=history, at=at, as_json=as_json)


def run_tag(
    kind: Kind,
    ref: str,
    repo: str,
    name: str | None,
    *,
    expect: str | None,
    remove: bool,
    history: bool,
    at: str | None,
    as_json: bool,
) -> None:
    """List, move or remove a tag, or print its history; for `tag` of data sets and of models."""
    from datasvc.repository import Repository
    from datasvc.repository.logs.references import parse_reference
    from datasvc.repository.resolved import KIND_NAMES

    repository = Repository.open(repo)
    owner = parse_reference(ref, KIND_NAMES[kind]).name
    if sum((remove, history, at is not None)) > 1 or (name is None and (remove or history or at or expect)):
        raise ConfigError("--remove, --history, --at and --expect need a tag; give a tag, and one of the first three")
    if expect is not None and (history or at is not None):
        raise ConfigError(
            "--expect is a condition for moving or removing a tag; leave it out with --history and --at"
        )
    if ref != owner and (history or at is not None):
        raise ConfigError(f"--history and --at are about all moves of a tag; give {owner} instead of {ref}")
    if name is None:
        _print_tags(repository, kind, repository.resolve(kind, ref, removed=True).name, as_json=as_json)
    elif history:
        _print_moves(_moves(repository, kind, owner, name), as_json=as_json)
    elif at is not None:
        moves = _moves(repository, kind, owner, name)
        _print_version_at(owner, name, moves, parse_time(at), as_json=as_json)
    elif remove:
        expected = _expected(expect, owner)
        if ref != owner:  # a version or a tag: remove `name` only if it points at this version
            version = repository.resolve(kind, ref, removed=True).version
            if expected not in {None, version}:
                raise ConfigError(f"{ref} is version {version}, but --expect is {expect}; leave one of them out")
            expected = version
        repository.untag(kind, owner, name, expect=expected)
        _print_result(owner, name, None, as_json=as_json)
    else:
        target = repository.tag(kind, ref, name, expect=_expected(expect, owner))
        _print_result(owner, name, str(target), as_json=as_json)


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


def _expected(text: str | None, owner: str) -> int | None:
    if text is None:
        return None
    if text == "none":
        return 0
    match = re.fullmatch(rf"(?:{re.escape(owner)}@)?([0-9]{{1,18}})", text)
    if not match:
        raise ConfigError(f"--expect {text!r} is not a version of {owner}; give a version number, or none")
    return int(match[1])


def _moves(repository: Repository, kind: Kind, owner: str, tag: str) -> list[Entry]:
    moves = repository.tag_history(kind, owner, tag)
    if not moves:
        tags = ", ".join(sorted(repository.tags(kind, owner))) or "none yet"
        raise NotFoundError(f"{owner} never had a tag {tag!r}; it has: {tags}")
    return moves


def _print_tags(repository: Repository, kind: Kind, owner: str, *, as_json: bool) -> None:
    tags = repository.tags(kind, owner)
    if as_json:
        print_json(tags)
    else:
        print_table(("tag", "version"), [(tag, f"{owner}@{version}") for tag, version in tags.items()])


def _print_moves(moves: list[Entry], *, as_json: bool) -> None:
    if as_json:
        print_json([dict(move.content) for move in moves])
        return
    rows = [
        (f"~{back}", move.content["version"] or "removed", move.content["created"])
        for back, move in enumerate(reversed(moves))
    ]
    print_table(("moves back", "version", "moved"), rows)


def _print_version_at(owner: str, tag: str, moves: list[Entry], when: datetime, *, as_json: bool) -> None:
    from datasvc.repository.logs.tags import choose_move, version_of

    move = choose_move(moves, when)
    version = version_of(move) if move is not None else 0
    time = when.isoformat(timespec="seconds")
    if version or as_json:
        found = f"{owner}@{version}" if version else None
        facts = {"tag": tag, "at": time, "version": found}
        print_result(facts, f"{owner}@{tag} was {found} at {time}", as_json=as_json)
    else:
        raise NotFoundError(f"{owner} had no tag {tag!r} at {time}; its first move was {moves[0].content['created']}")


def _print_result(owner: str, tag: str, version: str | None, *, as_json: bool) -> None:
    line = f"{owner}@{tag} is {version}" if version else f"removed {owner}@{tag}; its history stays"
    print_result({"tag": tag, "version": version}, line, as_json=as_json)

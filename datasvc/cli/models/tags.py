"""`datasvc models tag`: list, move and remove tags of a model, and read their history."""

from __future__ import annotations

from datasvc.cli.datasets.tags import (
    AtOption,
    ExpectOption,
    HistoryOption,
    RemoveOption,
    TagArgument,
    run_tag,
)
from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.output import JsonOption, RepoOption


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
    """Point TAG at a model version, optionally only if it points at an expected one; its history keeps all moves.

    Example: datasvc models tag digits-cnn@7 prod --expect 5 --repo ./repo

    In every command, NAME@TAG~1 is the version before the tag's newest move. Times are those of the writers' clocks.
    """
    run_tag("models", ref, repo, name, expect=expect, remove=remove, history=history, at=at, as_json=as_json)

"""`datasvc view`: create, list, show and remove named views of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, MessageOption, RepoOption, print_json, print_result, print_table
from datasvc.errors import ConfigError
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.shards.views.named import NamedView


@options_from(
    "shards.views.named.make_view",
    take=typer.Option(metavar="FRACTION"),
    seed=typer.Option(metavar="NUMBER"),
    weights=typer.Option(metavar="COLUMN"),
    balance=typer.Option(metavar="COLUMN"),
    strength=typer.Option(metavar="NUMBER"),
)
def view(
    ref: Annotated[str, reference("Data set, or the version of it to make a view of; also REF[CONDITION].")],
    repo: RepoOption,
    name: Annotated[
        str | None, typer.Argument(metavar="VIEW", help="View to make or show; without it, list the views.")
    ] = None,
    *,
    split: Annotated[str, typer.Option("--split", metavar="SPLIT", help="The split to make a view of.")] = "train",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the name of the view.")] = False,
    message: MessageOption = "",
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Make a named view of a data set: which of its samples are read, and how often. NAME[VIEW] opens it.

    Example: datasvc view pets no-cats --where "label != 'cat'" --repo ./repo

    The samples are chosen once, in this order: --where, --take, then --weights or --balance. `gc` keeps the view
    until its name is removed.
    """
    from datasvc.repository import Repository
    from datasvc.repository.logs.references import split_selection
    from datasvc.shards import open_dataset
    from datasvc.shards.views.named import find_named, make_view, read_views, remove_view, save_view

    repository = Repository.open(repo)
    version, selection = split_selection(ref)
    dataset = version.partition("@")[0]
    chosen = (selection, *(options[each] for each in ("where", "take", "weights", "balance")))
    makes = any(each is not None for each in chosen)
    if remove and makes:
        raise ConfigError("--remove and what makes a view exclude each other; give one of them")
    if name is None:
        if remove or makes:
            raise ConfigError("give the name of the view too: datasvc view NAME VIEW")
        _print_views(read_views(repository, dataset), as_json=as_json)
    elif remove:
        remove_view(repository, dataset, name, message=message)
        print_result({"view": name, "removed": True}, f"removed the view {dataset}[{name}]", as_json=as_json)
    else:
        if makes:
            made = make_view(open_dataset(repository, ref)[split], **options)
            found = save_view(repository, name, made, message=message)
        else:
            found = find_named(repository, dataset, name)
        what = f"{count_text(found.samples, 'sample')} of {found.dataset}/{found.split}: {'; '.join(found.steps)}"
        print_result(found.to_json(), f"{dataset}[{name}] has {what}", as_json=as_json)


def _print_views(views: Mapping[str, NamedView], *, as_json: bool) -> None:
    if as_json:
        print_json({name: found.to_json() for name, found in views.items()})
        return
    rows = [
        (
            name,
            f"{found.dataset}/{found.split}",
            found.samples,
            "; ".join(found.steps),
            "yes" if found.is_weighted else "no",
        )
        for name, found in views.items()
    ]
    print_table(("view", "of", "samples", "how", "weights"), rows)

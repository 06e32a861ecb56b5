"""`datasvc ingest | ls | show | log | tag`: data sets."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from datasvc.cli.output import JsonOption, RepoOption, byte_progress, print_facts, print_json, print_table

RefArgument = Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")]


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a data set.")]


class OnBad(StrEnum):
    """What becomes of samples that do not decode."""

    fail = "fail"
    skip = "skip"


def ingest(
    source: Annotated[str, typer.Argument(help="Folder of images, local or any fsspec URL.")],
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    repo: RepoOption,
    shard_size: Annotated[str, typer.Option(help="Image bytes per shard.")] = "64MiB",
    on_bad: Annotated[OnBad, typer.Option(help="Bad samples: commit nothing, or leave them out.")] = OnBad.fail,
    decode_check: Annotated[bool, typer.Option(help="Decode every image fully.")] = False,
    seed: Annotated[int, typer.Option(help="Of the permutation that deals samples to shards.")] = 0,
    message: Annotated[str, typer.Option("--message", "-m", help="Kept with the version.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Ingest SOURCE as the next version of data set NAME.

    Example: datasvc ingest ./photos pets --repo ./repo

    SOURCE/train/cat/1.jpg gives split "train" and label "cat"; without split folders all is "train".
    """
    from datasvc.repository import Repository
    from datasvc.repository.references import check_name
    from datasvc.shards.ingest import ingest as run_ingest
    from datasvc.shards.sources import ImageFolder
    from datasvc.sizes import format_size, parse_size

    shard_bytes = parse_size(shard_size)
    check_name(name, "data set")
    listed = ImageFolder.list(source)
    with byte_progress(f"ingesting {name}") as (set_total, advance):
        set_total(listed.size_bytes)
        done = run_ingest(
            Repository.create(repo),
            listed,
            name,
            shard_bytes=shard_bytes,
            on_bad=on_bad.value,
            decode_check=decode_check,
            seed=seed,
            message=message,
            report=advance,
        )
    if as_json:
        bad = [{"split": each.split, "key": each.key, "reason": each.reason} for each in done.bad]
        print_json(
            {
                "version": str(done.version),
                "samples": done.num_samples,
                "shards": done.num_shards,
                "bytes": done.size_bytes,
                "skipped": bad,
                "ignored": dict(done.ignored),
            }
        )
        return
    splits = ", ".join(f"{count} {split}" for split, count in done.num_samples.items())
    typer.echo(
        f"committed {done.version}: {splits} samples, {sum(done.num_shards.values())} shards, "
        f"{format_size(done.size_bytes)}"
    )
    for each in done.bad:
        typer.echo(f"skipped {each.split}/{each.key}: {each.reason}", err=True)
    if done.ignored:
        typer.echo(f"ignored, no images: {dict(done.ignored)}", err=True)


def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the data sets of a repository.

    Example: datasvc ls --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset

    repository = Repository.open(repo)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "version": (found := open_dataset(repository, name)).resolved.version,
            "samples": sum(split["samples"] for split in found.entry.content["splits"].values()),
            "bytes": sum(split["bytes"] for split in found.entry.content["splits"].values()),
            "tags": repository.tags("datasets", name),
        }
        for name in repository.names("datasets")
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(("name", "version", "samples", "bytes", "tags"), [_row(row) for row in rows])


def show(ref: RefArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """Show a data-set version: splits, columns, classes, source.

    Example: datasvc show pets@1 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset

    found = open_dataset(Repository.open(repo), ref)
    splits = {
        name: {
            "samples": len(split),
            "shards": split.table.num_shards,
            "bytes": split.table.size_bytes,
            "max_width": split.table.largest("max_width"),
            "max_height": split.table.largest("max_height"),
            "classes": list(split.classes),
            "columns": {field.name: str(field.type) for field in split.table.sample_schema},
            "table": split.digest,
        }
        for name, split in found.items()
    }
    if as_json:
        print_json({**found.entry.content, "version": str(found.resolved), "splits": splits})
        return
    entry = found.entry.content
    about = {"version": found.resolved, "created": entry["created"], "message": entry["message"] or "-"}
    print_facts({**about, "source": entry["source"]["url"], "skipped": entry["skipped"]})
    for name, facts in splits.items():
        print_facts({f"split {name}": facts})


def log(name: NameArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the versions of a data set, newest first.

    Example: datasvc log pets --repo ./repo
    """
    from datasvc.repository import Repository

    entries = Repository.open(repo).entries("datasets", name)
    if as_json:
        print_json([{**entry.content, "version": entry.number} for entry in entries])
        return
    rows = [
        (
            f"{name}@{entry.number}",
            entry.content["created"],
            sum(split["samples"] for split in entry.content["splits"].values()),
            entry.content["message"] or "-",
        )
        for entry in reversed(entries)
    ]
    print_table(("version", "created", "samples", "message"), rows)


def tag(
    ref: RefArgument,
    name: Annotated[str, typer.Argument(metavar="TAG", help="The tag to set or move.")],
    repo: RepoOption,
    as_json: JsonOption = False,
) -> None:
    """Let TAG stand on a data-set version; its earlier places stay in its history.

    Example: datasvc tag pets@1 stable --repo ./repo
    """
    from datasvc.repository import Repository

    target = Repository.open(repo).tag("datasets", ref, name)
    if as_json:
        print_json({"tag": name, "version": str(target)})
    else:
        typer.echo(f"{target.name}@{name} is {target}")


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    from datasvc.sizes import format_size

    tags = ", ".join(f"{tag}={version}" for tag, version in row["tags"].items()) or "-"
    return row["name"], row["version"], row["samples"], format_size(row["bytes"]), tags

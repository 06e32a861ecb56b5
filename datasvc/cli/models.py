"""`datasvc models ls | show | log | restore`: model versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.output import JsonOption, RepoOption, print_facts, print_json, print_table

if TYPE_CHECKING:
    from datasvc.models import ModelVersion

app = typer.Typer(no_args_is_help=True, help="Model versions: checkpoints that know what they came from.")

RefArgument = Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a model.")]


@app.command()
def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the models of a repository with their newest version.

    Example: datasvc models ls --repo ./repo
    """
    from datasvc.models import list_models
    from datasvc.repository import Repository

    _print_versions(list_models(Repository.open(repo)), as_json=as_json)


@app.command()
def log(name: NameArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the versions of a model, newest first.

    Example: datasvc models log digits-cnn --repo ./repo
    """
    from datasvc.models import model_log
    from datasvc.repository import Repository

    _print_versions(model_log(Repository.open(repo), name)[::-1], as_json=as_json)


@app.command()
def show(ref: RefArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """Show what a model version came from: data and position, code, configuration, metrics.

    Example: datasvc models show digits-cnn@3 --repo ./repo
    """
    from datasvc.models import CodeRevision, describe_model
    from datasvc.repository import Repository

    found = describe_model(Repository.open(repo), ref)
    if as_json:
        print_json(_facts(found))
        return
    entry = found.entry
    print_facts(
        {
            "version": f"{found.name}@{found.version}",
            "tags": ", ".join(found.tags) or "-",
            "created": entry["created"],
            "message": entry["message"] or "-",
            "step": entry["step"],
            "parent": entry["parent"] or "-",
            "tensors": f"{entry['num_tensors']}, {entry['bytes']} bytes, table {entry['tensors']}",
            "code": CodeRevision(**entry["code"]),
        }
    )
    for use in entry["data"]:
        print_facts({f"data {use['dataset']}/{use['split']}": use["state"]})
    print_facts({"config": entry["config"], "metrics": entry["metrics"]})


@app.command()
def restore(
    ref: RefArgument,
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    repo: RepoOption,
    as_json: JsonOption = False,
) -> None:
    """Write a model version, every byte verified, as safetensors and JSON.

    Example: datasvc models restore digits-cnn@3 ./restored --repo ./repo
    """
    from datasvc.models import restore as run_restore
    from datasvc.models.export import export_checkpoint
    from datasvc.repository import Repository

    checkpoint = run_restore(Repository.open(repo), ref)
    files = export_checkpoint(checkpoint, folder)
    if as_json:
        print_json({"version": str(checkpoint.version), "files": [str(file) for file in files]})
    else:
        typer.echo(f"restored {checkpoint.version}, verified: {', '.join(str(file) for file in files)}")


def _facts(found: ModelVersion) -> dict[str, Any]:
    return {"name": found.name, "version": found.version, "tags": list(found.tags), **found.entry}


def _print_versions(versions: list[ModelVersion], *, as_json: bool) -> None:
    if as_json:
        print_json([_facts(found) for found in versions])
        return
    rows = [
        (
            f"{found.name}@{found.version}",
            found.entry["created"],
            found.entry["step"],
            ", ".join(sorted({use["dataset"] for use in found.entry["data"]})) or "-",
            ", ".join(f"{name} {_number(value)}" for name, value in found.entry["metrics"].items()) or "-",
            ", ".join(found.tags) or "-",
        )
        for found in versions
    ]
    print_table(("version", "created", "step", "data", "metrics", "tags"), rows)


def _number(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""`datasvc models ls | log | show`: which models there are, and what their versions say."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from datasvc.cli.models.arguments import NameArgument, RefArgument
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json, print_table
from datasvc.cli.terminal.values import text_value

if TYPE_CHECKING:
    from datasvc.models import ModelVersion
    from datasvc.repository import Entry, Repository


def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the models of a repository with their newest version.

    Example: datasvc models ls --repo ./repo
    """
    from datasvc.models import list_models
    from datasvc.repository import Repository

    print_versions(list_models(Repository.open(repo)), as_json=as_json)


def log(
    name: NameArgument,
    repo: RepoOption,
    last: Annotated[int | None, typer.Option(min=1, help="Only so many, the newest.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the history of a model, newest first: forks, merges, and versions of other models that it was made from.

    Example: datasvc models log digits-cnn --repo ./repo
    """
    from datasvc.models.registry.graph import read_history
    from datasvc.models.registry.registry import model_log
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    if as_json:
        print_json([version_facts(found) for found in model_log(repository, name, last=last)[::-1]])
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in read_history(repository, name, last=last):
        text = line.graph if line.version is None else f"{line.graph} {_summary(line.version)}"
        if not sys.stdout.isatty():
            sys.stdout.write(f"{text}\n")
        else:
            console.print(Text(text, style="dim" if line.version and line.version.removed else ""))


def show(ref: RefArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """Show what a model version came from: data and position, code, configuration, metrics; a removed one too.

    Example: datasvc models show digits-cnn@3 --repo ./repo
    """
    from datasvc.models import describe_model
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    found = describe_model(repository, ref)
    removal = repository.removals("models", found.name).find(found.version) if found.removed else None
    if as_json:
        print_json(version_facts(found) | ({"removal": dict(removal.content)} if removal else {}))
        return
    entry = found.entry
    print_facts({"version": str(found)} | _removal_line(removal))
    print_facts(
        {
            "tags": "; ".join(_tag_line(repository, found.name, tag) for tag in found.tags) or "-",
            "created": entry["created"],
            "message": entry["message"] or "-",
            "step": entry["step"],
            "parent": ", ".join(found.parents) or "-",
            "tensors": _tensors_line(entry),
            "code": _code_line(entry["code"]),
        }
    )
    if entry.get("num_nonfinite"):
        print_facts({"NOT FINITE (NaN or infinite elements)": entry["num_nonfinite"]})
    if not entry["data"]:
        print_facts({"data": "no consumed samples were recorded"})
    for use in entry["data"]:
        print_facts({f"data {use['dataset']}/{use['split']}": use["state"]})
    print_facts({part: entry[part] for part in ("environment", "duration", "config", "metrics") if part in entry})


def version_facts(found: ModelVersion) -> dict[str, Any]:
    """Return a version as JSON values."""
    place = {"name": found.name, "version": found.version, "tags": list(found.tags)}
    return place | ({"removed": True} if found.removed else {}) | dict(found.entry)


def print_versions(versions: Sequence[ModelVersion], *, as_json: bool) -> None:
    """Print versions as a table, or as JSON."""
    if as_json:
        print_json([version_facts(found) for found in versions])
        return
    rows = [
        (
            f"{found}{' (removed)' if found.removed else ''}",
            found.entry["created"],
            found.entry["step"],
            ", ".join(sorted({use["dataset"] for use in found.entry["data"]})) or "-",
            metrics_line(found.entry["metrics"]) or "-",
            ", ".join(found.tags) or "-",
        )
        for found in versions
    ]
    print_table(("version", "created", "step", "data", "metrics", "tags"), rows)


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Return metrics on one line."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def _summary(found: ModelVersion) -> str:
    """Return what stands beside a version in the drawing."""
    entry = found.entry
    parts = [
        str(found),
        "(removed)" if found.removed else "",
        f"[{', '.join(found.tags)}]" if found.tags else "",
        str(entry["created"]),
        f"step {entry['step']}",
        metrics_line(entry["metrics"]),
        "NOT FINITE" if entry.get("num_nonfinite") else "",
        str(entry["message"]),
    ]
    return text_value("  ".join(part for part in parts if part))


def _removal_line(removal: Entry | None) -> dict[str, object]:
    if removal is None:
        return {}
    why = f" ({removal.content['message']})" if removal.content.get("message") else ""
    return {"REMOVED": f"{removal.content['created']}{why}: only what is said here is left"}


def _tag_line(repository: Repository, name: str, tag: str) -> str:
    """Return a tag, since when it stands here, and where it stood before."""
    *before, now = repository.tag_history("models", name, tag)
    places = [str(move.content["version"] or "nowhere") for move in reversed(before)]
    return f"{tag} since {now.content['created']}" + (f", before on {', '.join(places)}" if places else "")


def _tensors_line(entry: Mapping[str, Any]) -> str:
    from datasvc.sizes import format_size

    stored = (
        f", {format_size(entry['stored_bytes'])} of them new when it was saved" if "stored_bytes" in entry else ""
    )
    return f"{entry['num_tensors']}, {entry['bytes']} bytes{stored}, table {entry['tensors']}"


def _code_line(code: Mapping[str, Any]) -> str:
    if code.get("revision") is None:
        return "not in a git checkout"
    kept = f", kept as object {code['diff']}" if code.get("diff") else ""
    return f"{code['revision']}" + (f" (with local changes{kept})" if code.get("dirty") else "")

"""`datasvc models ls | log | show`: list models, draw their history, and show the metadata of a version."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from datasvc.cli.datasets.show import removal_line
from datasvc.cli.models.arguments import NameArgument, RefArgument
from datasvc.cli.terminal.output import (
    JsonOption,
    LastOption,
    RepoOption,
    SvgOption,
    print_facts,
    print_json,
    print_line,
    print_table,
    unreadable_facts,
    write_version_graph,
)
from datasvc.errors import ConfigError
from datasvc.models.versions.data_use import use_text
from datasvc.printable import text_value

if TYPE_CHECKING:
    from datasvc.models import ModelVersion
    from datasvc.repository import Repository


def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the models of a repository with their newest version.

    Example: datasvc models ls --repo ./repo
    """
    from datasvc.models import list_models
    from datasvc.repository import Repository
    from datasvc.repository.store.redaction import redact_url

    repository = Repository.open(repo)
    versions = list_models(repository)
    if not versions and not unreadable_facts() and not as_json:
        print_line(f"no models in {redact_url(repository.url)}", err=True)
    print_versions(versions, as_json=as_json)


def log(
    name: NameArgument,
    repo: RepoOption,
    last: LastOption = None,
    svg: SvgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the history of a model, newest first: forks, merges, and parent versions of other models.

    Example: datasvc models log digits-cnn --svg digits-cnn.svg --repo ./repo
    """
    from datasvc.models.registry.graph import read_history
    from datasvc.models.registry.registry import model_log
    from datasvc.repository import Repository
    from datasvc.views.models import version_nodes

    repository = Repository.open(repo)
    if svg is not None:
        history = read_history(repository, name, last=last)
        write_version_graph(svg, version_nodes(line.version for line in history if line.version), name)
    if as_json:
        facts = [version.to_dict() for version in model_log(repository, name, last=last)[::-1]]
        print_json([*facts, *unreadable_facts()])
        return
    if svg is not None:
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in read_history(repository, name, last=last):
        text = line.graph if line.version is None else f"{line.graph} {_summary(line.version)}"
        if not sys.stdout.isatty():  # plain text for other programs
            sys.stdout.write(f"{text}\n")
        else:
            console.print(Text(text, style="dim" if line.version and line.version.removed else ""))


def show(
    ref: RefArgument,
    repo: RepoOption,
    stored: Annotated[
        bool, typer.Option("--stored", help="Show how the version is stored instead: bytes, objects, differences.")
    ] = False,
    signers: Annotated[
        bool, typer.Option("--signers", help="Show the keys that have signed it instead; they are not checked.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the metadata of a model version, even a removed one: data, position, code, configuration, metrics.

    Example: datasvc models show digits-cnn@3 --repo ./repo
    """
    if stored and signers:
        raise ConfigError("--stored and --signers are two answers; give one of them")
    if stored:
        _show_stored(ref, repo, as_json=as_json)
    elif signers:
        _show_signers(ref, repo, as_json=as_json)
    else:
        _show_metadata(ref, repo, as_json=as_json)


def _show_stored(ref: str, repo: str, *, as_json: bool) -> None:
    from datasvc.models.registry.registry import stored_size
    from datasvc.repository import Repository
    from datasvc.sizes import format_size

    found = stored_size(Repository.open(repo), ref)
    if as_json:
        print_json(found.to_dict())
        return
    print_facts(
        {
            "tensors": f"{format_size(found.tensor_bytes)} in memory",
            "stored": f"{format_size(found.stored_bytes)}, which other versions may share",
            "chunks": f"{found.num_chunks:,} in {found.num_objects:,} objects",
            "stored whole": f"{found.chain_lengths.get(1, 0):,} chunks",
            **{
                f"stored with {length - 1} differences": f"{num:,} chunks"
                for length, num in found.chain_lengths.items()
                if length > 1
            },
        }
    )


def _show_signers(ref: str, repo: str, *, as_json: bool) -> None:
    from datasvc.models.versions.signing import signers
    from datasvc.repository import Repository

    found = signers(Repository.open(repo), ref)
    if as_json:
        print_json(found)
        return
    if not found:
        print_line(f"{ref} is not signed", err=True)
    for key in found:
        print_line(key)


def _show_metadata(ref: str, repo: str, *, as_json: bool) -> None:
    from datasvc.models import describe_model
    from datasvc.models.registry.registry import show_facts
    from datasvc.repository import Repository
    from datasvc.views.models import describe
    from datasvc.views.view import fact_texts

    repository = Repository.open(repo)
    version = describe_model(repository, ref)
    facts = show_facts(repository, version)
    if as_json:
        print_json(facts)
        return
    entry = version.entry
    tags = "; ".join(_tag_line(repository, version.name, tag) for tag in version.tags)
    described = fact_texts(describe(version)) | ({"tags": tags} if tags else {})
    # All digits of the metrics follow below.
    described.pop("metrics", None)
    print_facts(described | {"version": str(version)} | removal_line(facts.get("removal")))
    for artefact in facts.get("artefacts", ()):
        print_facts({f"artefact {artefact['name']}": _artefact_line(artefact)})
    for use in entry["data"]:
        print_facts({f"data {use_text(use)}": use["state"]})
    print_facts(
        {part: entry[part] for part in ("environment", "execution", "duration", "config", "metrics") if part in entry}
    )


def print_versions(versions: Sequence[ModelVersion], *, as_json: bool) -> None:
    """Print versions as a table, or as JSON."""
    if as_json:
        print_json([*(version.to_dict() for version in versions), *unreadable_facts()])
        return
    from datasvc.views.models import metrics_text

    rows = [
        (
            f"{version}{' (removed)' if version.removed else ''}",
            version.entry["created"],
            version.entry["step"],
            ", ".join(sorted({use["dataset"] for use in version.entry["data"]})) or "-",
            metrics_text(version.entry["metrics"]) or "-",
            ", ".join(version.tags) or "-",
        )
        for version in versions
    ]
    print_table(("version", "created", "step", "data", "metrics", "tags"), rows)


def _summary(version: ModelVersion) -> str:
    """Return the text beside a version in the graph of `log`."""
    from datasvc.views.models import metrics_text

    entry = version.entry
    parts = [
        str(version),
        "(removed)" if version.removed else "",
        f"[{', '.join(version.tags)}]" if version.tags else "",
        str(entry["created"]),
        f"step {entry['step']}",
        metrics_text(entry["metrics"]),
        "NOT FINITE" if entry.get("num_nonfinite") else "",
        str(entry["message"]),
    ]
    return text_value("  ".join(part for part in parts if part))


def _tag_line(repository: Repository, name: str, tag: str) -> str:
    """Return a tag, the time of its last move, and the versions that it pointed at before, newest first."""
    *earlier, newest = repository.tag_history("models", name, tag)
    versions = [str(move.content["version"] or "none") for move in reversed(earlier)]
    return f"{tag} since {newest.content['created']}" + (f", before on {', '.join(versions)}" if versions else "")


def _artefact_line(artefact: Mapping[str, Any]) -> str:
    from datasvc.sizes import format_size

    details = [f"{name} {value}" for name, value in artefact["details"].items()]
    files = [f"{len(artefact['files'])} files"] if len(artefact["files"]) > 1 else []
    parts = [artefact["format"], *details, *files, format_size(artefact["bytes"]), f"digest {artefact['digest']}"]
    return ", ".join([*parts, *filter(None, [artefact["message"]])])

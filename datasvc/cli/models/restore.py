"""`datasvc models restore | attach | detach | fetch`: write a model version, or its artefacts, as files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.models.arguments import ExcludeOption, MapOption, OnlyOption, RefArgument, TrustedOption
from datasvc.cli.nodes.options import BudgetOption, PeersOption
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_result
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.cache import Cache
    from datasvc.models.restoring.report import RestoreReport


CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", envvar="DATASVC_CACHE", help="Folder of this node's cache; objects are read through it."),
]
FallbackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fallback",
        metavar="URL",
        help="Other repository to read missing or damaged objects from; may be given several times.",
    ),
]


MessageOption = Annotated[str, typer.Option("--message", "-m", help="Text to keep with the entry.")]


def restore(
    ref: RefArgument,
    folder: Annotated[Path, typer.Argument(help="New or empty folder.")],
    repo: RepoOption,
    cache: CacheOption = None,
    budget: BudgetOption = None,
    peers: PeersOption = None,
    fallback: FallbackOption = None,
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: MapOption = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model version, with every byte verified, as safetensors and JSON files.

    Example: datasvc models restore digits-cnn@3 ./restored --repo ./repo

    Example: datasvc models restore gpt@prod ./restored --repo s3://bucket/repo --cache /nvme/cache
    """
    from datasvc.models.interop.exporting import export_checkpoint
    from datasvc.models.interop.whole_folder import check_target
    from datasvc.models.restoring.restore import restore as run_restore
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    check_target(folder)
    with (
        _open_cache(cache, budget, peers) as opened,
        byte_progress(f"restoring {ref}") as progress,
    ):
        checkpoint = run_restore(
            repository,
            ref,
            cache=opened,
            fallback=fallback or (),
            only=only or (),
            exclude=exclude or (),
            rename=parse_name_map(rename or ()),
            trusted_keys=trusted or None,
            progress=progress,
        )
    files = export_checkpoint(checkpoint, folder)
    report = checkpoint.report
    if as_json:
        facts = {**asdict(report), "bytes_s": report.bytes_s}
        print_json({"version": str(checkpoint.version), "files": [str(file) for file in files], **facts})
        return
    print_line(f"restored {checkpoint.version}, verified: {', '.join(str(file) for file in files)}")
    for line in describe_restore(report):
        print_line(line)


def describe_restore(report: RestoreReport) -> list[str]:
    """Return the size, speed, sources and bad copies of a restore as lines of text."""
    from datasvc.sizes import format_size

    sources = ", ".join(f"{source} {format_size(count)}" for source, count in sorted(report.came_bytes.items()))
    size, rate = format_size(report.size_bytes), format_size(report.bytes_s)
    summary = f"{size} of tensors in {report.seconds:.2f} s, {rate}/s; stored bytes: {sources or 'none'}"
    return [summary, *(f"bad copy: {copy}" for copy in report.bad_copies)]


@contextmanager
def _open_cache(folder: Path | None, budget: str | None, peers: str | None) -> Iterator[Cache | None]:
    # Peers without a cache are ignored, because DATASVC_PEERS may be set for all commands of a node.
    if folder is None:
        yield None
        return
    from datasvc.cache import Cache
    from datasvc.node.settings import open_peers

    with Cache(folder, budget=budget, peers=None if peers is None else open_peers(peers)) as opened:
        yield opened


@options_from("models.interop.artefact_files.attach")
def attach(
    ref: RefArgument,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or folder to attach.")],
    repo: RepoOption,
    *,
    message: MessageOption = "",
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Attach a file or folder to a model version as an artefact, such as an ONNX file that was made from it.

    `models show` lists artefacts, `models fetch` writes them to disk again, `models push` and `pull` copy them. A
    signature of the version does not cover them.

    Example: datasvc models attach digits-cnn@3 ./model.onnx --repo ./repo
    """
    from datasvc.models.interop.artefact_files import attach as run_attach
    from datasvc.repository import Repository

    with byte_progress(f"storing {path}") as progress:
        artefact = run_attach(Repository.open(repo), ref, path, message=message, progress=progress, **options)
    line = f"attached {artefact.name} to {artefact.version}: {artefact.format}, digest {artefact.digest}"
    print_result({"version": str(artefact.version), **artefact.to_dict()}, line, as_json=as_json)


def detach(
    ref: RefArgument,
    name: Annotated[str, typer.Argument(metavar="ARTEFACT", help="Name of the artefact.")],
    repo: RepoOption,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Detach an artefact from a model version; `gc` deletes its files later.

    Example: datasvc models detach digits-cnn@3 model.onnx --repo ./repo
    """
    from datasvc.models.versions.artefacts import detach as run_detach
    from datasvc.repository import Repository

    artefact = run_detach(Repository.open(repo), ref, name, message=message)
    line = f"detached {artefact.name} from {artefact.version}; gc deletes its files if nothing else has them"
    print_result({"version": str(artefact.version), **artefact.to_dict()}, line, as_json=as_json)


def fetch(
    ref: RefArgument,
    folder: Annotated[Path, typer.Argument(help="New or empty folder.")],
    repo: RepoOption,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="ARTEFACT", help="Only this artefact; may be given several times."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the artefacts of a model version into a folder, with every byte verified.

    Example: datasvc models fetch digits-cnn@3 ./serving --name model.onnx --repo ./repo
    """
    from datasvc.models.interop.artefact_files import fetch_artefacts
    from datasvc.repository import Repository

    with byte_progress(f"fetching artefacts of {ref}") as progress:
        files = fetch_artefacts(Repository.open(repo), ref, folder, names or (), progress=progress)
    if as_json:
        print_json({"files": list(map(str, files))})
    else:
        for file in files:
            print_line(str(file))

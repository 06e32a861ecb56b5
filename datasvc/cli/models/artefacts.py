"""`datasvc models attach | detach | fetch`: artefacts of model versions, such as ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line
from datasvc.progress import byte_progress

MessageOption = Annotated[str, typer.Option("--message", "-m", help="Text to keep with the entry.")]


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
    if as_json:
        print_json({"version": str(artefact.version), **artefact.to_dict()})
    else:
        print_line(f"attached {artefact.name} to {artefact.version}: {artefact.format}, digest {artefact.digest}")


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
    if as_json:
        print_json({"version": str(artefact.version), **artefact.to_dict()})
    else:
        print_line(f"detached {artefact.name} from {artefact.version}; gc deletes its files if nothing else has them")


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

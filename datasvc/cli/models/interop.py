"""`datasvc models import | export`: convert model versions from and to files of other formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from datasvc.cli.models.arguments import (
    ExcludeOption,
    MapOption,
    NameArgument,
    OnlyOption,
    RefArgument,
    TrustedOption,
)
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_result
from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.models.interop.exporting import ModelExport
    from datasvc.models.interop.importing import ImportReport
    from datasvc.repository import Repository

_DEFAULT_SHARD_SIZE = "5GB"


ModelFormat = Literal["safetensors", "huggingface", "torch", "dcp", "onnx"]


@options_from("models.interop.importing.import_model", step=typer.Option(min=0), parent=typer.Option(metavar="REF"))
def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="Safetensors file, file of torch.save, Hugging Face folder, or DCP folder."
        ),
    ],
    name: NameArgument,
    repo: RepoOption,
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: MapOption = None,
    *,
    reader_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Maximum memory for reading torch.save or DCP files, besides their tensors."
        ),
    ] = "1GiB",
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Store a model of another format as the next version of NAME. Code in SOURCE is never executed.

    Example: datasvc models import ./bert-base bert --repo ./repo

    Example: datasvc models import resnet50.pth resnet50 --map fc=head --repo s3://bucket/repo
    """
    from datasvc.models.interop import import_model as run_import
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.repository import Repository
    from datasvc.sizes import parse_size

    with byte_progress(f"importing {source.name}") as progress:
        report = run_import(
            Repository.open(repo),
            source,
            name,
            only=only or (),
            exclude=exclude or (),
            rename=parse_name_map(rename or ()),
            reader_memory_bytes=parse_size(reader_memory),
            progress=progress,
            **options,
        )
    _print_imported(source, report, as_json=as_json)


def _print_imported(source: Path, report: ImportReport, *, as_json: bool) -> None:
    from datasvc.sizes import format_size

    if as_json:
        print_json(
            {
                "version": str(report.version),
                "format": report.format,
                "tensors": report.num_tensors,
                "bytes": report.bytes,
                "new_bytes": report.new_bytes,
                "ignored": list(report.ignored),
                "files": list(report.files),
                "left_out": list(report.left_out),
            }
        )
        return
    print_line(
        f"imported {source} ({report.format}) as {report.version}: {count_text(report.num_tensors, 'tensor')}, "
        f"{format_size(report.bytes)}, {format_size(report.new_bytes)} of them newly stored"
    )
    if report.ignored:
        names = ", ".join(report.ignored[:5])
        print_line(
            f"left out {count_text(len(report.ignored), 'tensor that is', 'tensors that are')} not in the "
            f"index of the source: {names}"
        )
    if report.files:
        print_line(f"kept with the version: {', '.join(report.files)}")
    if report.left_out:  # files and folders; `ignored` has tensors
        print_line(f"left out: {', '.join(report.left_out)}")


def export_model(
    ref: RefArgument,
    folder: Annotated[Path, typer.Argument(help="New or empty folder.")],
    repo: RepoOption,
    export_format: Annotated[ModelFormat, typer.Option("--format", help="Format to write.")] = "safetensors",
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: MapOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Convert floating-point tensors to this type: float32, bfloat16, float16 or float64."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help=f"With huggingface: maximum size of a file; default: {_DEFAULT_SHARD_SIZE}.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With onnx: PACKAGE.MODULE:CALLABLE, which is imported and called to create the module."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="With onnx: example input such as 2x3x224x224 or 2x128:int64, once per input."),
    ] = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model version, with every byte verified, as files of another format.

    Example: datasvc models export bert@prod ./bert --format huggingface --dtype bfloat16 --repo ./repo

    FOLDER appears with all its files, or not at all.
    """
    from datasvc.models.interop import export_model as run_export
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.repository import Repository
    from datasvc.sizes import parse_size

    repository, name_map = Repository.open(repo), parse_name_map(rename or ())
    if export_format == "onnx":
        _refuse_for_onnx({"--only": only, "--exclude": exclude, "--dtype": dtype, "--max-shard-size": max_shard_size})
        _export_onnx(repository, ref, folder, model, inputs or [], name_map, trusted, as_json=as_json)
        return
    with byte_progress(f"exporting {ref}") as progress:
        result = run_export(
            repository,
            ref,
            folder,
            export_format,
            only=only or (),
            exclude=exclude or (),
            rename=name_map,
            dtype=dtype,
            max_shard_bytes=parse_size(max_shard_size or _DEFAULT_SHARD_SIZE),
            trusted_keys=trusted or None,
            progress=progress,
        )
    _print_exported(folder, result, as_json=as_json)


def _print_exported(folder: Path, result: ModelExport, *, as_json: bool) -> None:
    from datasvc.sizes import format_size

    files = [str(file) for file in result.files]
    facts = {"version": str(result.version), "format": result.format, "files": files}
    line = (
        f"exported {result.version} as {result.format} to {folder}: {count_text(result.num_tensors, 'tensor')}, "
        f"{format_size(result.bytes)}, {count_text(len(files), 'file')}"
    )
    print_result(facts | {"tensors": result.num_tensors, "bytes": result.bytes}, line, as_json=as_json)


def _refuse_for_onnx(options: dict[str, object]) -> None:
    refused = [option for option, value in options.items() if value]
    if refused:
        raise ConfigError(
            f"{' and '.join(refused)} cannot be used with --format onnx: the module determines the tensors and "
            "their types; leave it out, or export as safetensors"
        )


def _export_onnx(
    repository: Repository,
    ref: str,
    folder: Path,
    model: str | None,
    inputs: list[str],
    rename: dict[str, str],
    trusted: list[Path] | None,
    *,
    as_json: bool,
) -> None:
    from datasvc.models.interop.onnx_file import export_onnx, make_input, make_model

    if model is None or not inputs:
        raise ConfigError(
            "an export to ONNX traces a module; give it with --model PACKAGE.MODULE:CALLABLE, and an example of "
            "each of its inputs with --input"
        )
    examples = [make_input(text) for text in inputs]
    result = export_onnx(
        repository, ref, folder, make_model(model), examples, rename=rename, trusted_keys=trusted or None
    )
    files, num_tensors = [str(file) for file in result.files], len(result.loaded.loaded)
    facts = {"version": str(result.version), "format": "onnx", "files": files, "tensors": num_tensors}
    print_result(facts, f"exported {result.version} as onnx: {', '.join(files)}", as_json=as_json)

"""`datasvc models import | export`: model versions from and to the files of others."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.models.arguments import (
    ExcludeOption,
    MapOption,
    NameArgument,
    OnlyOption,
    RefArgument,
    TrustedOption,
)
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json
from datasvc.cli.terminal.values import text_value
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.repository import Repository


DEFAULT_SHARD_SIZE = "5GB"


class CodecName(StrEnum):
    """How tensors are stored."""

    none = "none"
    planes = "planes"
    delta = "delta"


class ModelFormat(StrEnum):
    """What an export is written as."""

    safetensors = "safetensors"
    huggingface = "huggingface"
    torch = "torch"
    dcp = "dcp"
    onnx = "onnx"


def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A safetensors file, a file of torch.save, a Hugging Face folder, a DCP folder."
        ),
    ],
    name: NameArgument,
    repo: RepoOption,
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: MapOption = None,
    prefix: Annotated[
        str, typer.Option(help="Where a bare set of tensors, as a state dict is, goes in the state.")
    ] = "model",
    codec: Annotated[CodecName, typer.Option(help="How tensors are stored.")] = CodecName.delta,
    step: Annotated[int, typer.Option(min=0, help="Optimizer steps behind it, where that is known.")] = 0,
    parent: Annotated[str | None, typer.Option(metavar="REF", help="The version that it continues.")] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="For people.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Store a model of another format as the next version of NAME. No code in it is ever run.

    Example: datasvc models import ./bert-base bert --repo ./repo

    Example: datasvc models import resnet50.pth resnet50 --map fc=head --repo s3://bucket/repo
    """
    from datasvc.models.interop import import_model as run_import
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.repository import Repository
    from datasvc.sizes import format_size

    with byte_progress(f"importing {source.name}") as (set_total, advance):
        done = run_import(
            Repository.open(repo),
            source,
            name,
            only=only or (),
            exclude=exclude or (),
            rename=parse_name_map(rename or ()),
            prefix=prefix,
            codec=codec.value,
            step=step,
            parent=parent,
            message=message,
            begin=set_total,
            report=advance,
        )
    if as_json:
        print_json(
            {
                "version": str(done.version),
                "format": done.format,
                "tensors": done.num_tensors,
                "bytes": done.bytes,
                "new_bytes": done.new_bytes,
                "ignored": list(done.ignored),
            }
        )
        return
    typer.echo(
        f"imported {source} ({done.format}) as {done.version}: {done.num_tensors} tensors, "
        f"{format_size(done.bytes)}, {format_size(done.new_bytes)} of them new here"
    )
    if done.ignored:
        shown = ", ".join(map(text_value, done.ignored[:5]))
        typer.echo(f"left out {len(done.ignored)} tensors that the index does not name: {shown}")


def export_model(
    ref: RefArgument,
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    repo: RepoOption,
    export_format: Annotated[ModelFormat, typer.Option("--format", help="What to write.")] = ModelFormat.safetensors,
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: MapOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="What floating-point tensors become: float32, bfloat16, float16, float64.")
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Of huggingface: the largest file; default 5GB.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Of onnx: what makes the module, PACKAGE.MODULE:CALLABLE. It is run.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Of onnx: an example input such as 2x3x224x224 or 2x128:int64; one per input."),
    ] = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model version, every byte verified, as files that need no datasvc.

    Example: datasvc models export bert@prod ./bert --format huggingface --dtype bfloat16 --repo ./repo

    FOLDER is there with all its files, or not at all.
    """
    from datasvc.models.interop import export_model as run_export
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.repository import Repository
    from datasvc.sizes import format_size, parse_size

    repository, rules = Repository.open(repo), parse_name_map(rename or ())
    if export_format is ModelFormat.onnx:
        given = {"--only": only, "--exclude": exclude, "--dtype": dtype, "--max-shard-size": max_shard_size}
        _refuse_options([option for option, value in given.items() if value])
        _export_onnx(repository, ref, folder, model, inputs or [], rules, trusted, as_json=as_json)
        return
    with byte_progress(f"exporting {ref}") as (set_total, advance):
        done = run_export(
            repository,
            ref,
            folder,
            export_format.value,
            only=only or (),
            exclude=exclude or (),
            rename=rules,
            dtype=dtype,
            max_shard_bytes=parse_size(max_shard_size or DEFAULT_SHARD_SIZE),
            trusted_keys=trusted or None,
            begin=set_total,
            report=advance,
        )
    files = [str(file) for file in done.files]
    if as_json:
        print_json(
            {
                "version": str(done.version),
                "format": done.format,
                "files": files,
                "tensors": done.num_tensors,
                "bytes": done.bytes,
            }
        )
        return
    typer.echo(
        f"exported {done.version} as {done.format} to {folder}: {done.num_tensors} tensors, "
        f"{format_size(done.bytes)}, {len(files)} files"
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
    from datasvc.errors import ConfigError
    from datasvc.models.interop.onnx_file import export_onnx, make_input, make_model

    if model is None or not inputs:
        raise ConfigError(
            "an export to ONNX traces a module: name it by --model, and an example of each input by --input"
        )
    examples = [make_input(text) for text in inputs]
    done = export_onnx(
        repository, ref, folder, make_model(model), examples, rename=rename, trusted_keys=trusted or None
    )
    files, num_tensors = [str(file) for file in done.files], len(done.loaded.loaded)
    if as_json:
        print_json({"version": str(done.version), "format": "onnx", "files": files, "tensors": num_tensors})
    else:
        typer.echo(f"exported {done.version} as onnx: {', '.join(files)}")


def _refuse_options(given: list[str]) -> None:
    from datasvc.errors import ConfigError

    if given:
        raise ConfigError(
            f"an export to ONNX has no use for {' and '.join(given)}: the module says which tensors there are, of "
            "which dtype. Export without, or as safetensors"
        )

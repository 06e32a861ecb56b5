"""A model version as an ONNX program: its weights in a module that the caller names, traced by torch's exporter."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.models.interop.whole_folder import check_target, filling
from datasvc.models.restoring.fit import LoadReport
from datasvc.models.restoring.load_into_module import load_version_into
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.repository import Repository, Resolved

if TYPE_CHECKING:
    import torch

ONNX_FILE: Final = "model.onnx"
_INPUT = re.compile(r"(\d+(?:x\d+)*)(?::([a-z0-9_]+))?")
_NEEDED: Final = ("onnx", "onnxscript")


@dataclass(frozen=True)
class OnnxExport:
    """What an export wrote.

    Attributes:
        version: that was exported.
        files: in the folder: the program, and its weights where they are too large for it.
        loaded: how the version's tensors fit the module.
    """

    version: Resolved
    files: tuple[Path, ...]
    loaded: LoadReport


def export_onnx(
    repository: Repository,
    ref: str,
    folder: str | Path,
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    prefix: str = "model",
    rename: Mapping[str, str] | None = None,
    dynamic_batch: bool = True,
    source: ChunkSource | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
) -> OnnxExport:
    """Write a version as `model.onnx`.

    Args:
        repository: where the version is.
        ref: NAME, NAME@VERSION or NAME@TAG.
        folder: new or empty, local.
        model: of the architecture; its tensors are overwritten, and it is in evaluation mode afterwards.
        inputs: an example of each.
        prefix: as of `load_into_module.load_version_into`.
        rename: likewise.
        dynamic_batch: the first dimension of every input may be of any size; then examples need 2 or more there.
        source: of the tensors' bytes, default the repository.
        trusted_keys: as of `stored_version.read_version`.

    Raises:
        ConfigError: onnx is not installed; nothing can be written to the folder; the version does not fit the module;
            or torch cannot express it in ONNX.
        NotFoundError, CorruptDataError, UnavailableError: see `load_into_module.load_version_into`.
    """
    import torch

    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(f"an export to ONNX needs {' and '.join(missing)}: {how_to_install('onnx')}")
    check_target(Path(folder))
    version = repository.resolve("models", ref)
    loaded = load_version_into(
        model, repository, str(version), prefix=prefix, rename=rename, source=source, trusted_keys=trusted_keys
    )
    model.eval()
    batch = torch.export.Dim.DYNAMIC if dynamic_batch else None
    shapes = tuple({0: batch} if batch and each.dim() else None for each in inputs)
    target = Path(folder)
    with filling(target) as temporary:
        try:
            torch.onnx.export(
                model,
                tuple(inputs),
                temporary / ONNX_FILE,
                dynamo=True,
                dynamic_shapes=shapes if batch else None,
                verbose=False,
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
            first = str(error).strip().splitlines()
            raise ConfigError(
                f"torch cannot export {type(model).__name__} to ONNX: {first[0] if first else error!r}"
            ) from error
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        files = tuple(target / file.name for file in sorted(temporary.iterdir()))
    return OnnxExport(version, files, loaded)


def make_model(text: str) -> torch.nn.Module:
    """Return the module that `PACKAGE.MODULE:CALLABLE` makes: the caller's own code, which is run.

    Raises:
        ConfigError: there is no such thing, or it makes no module.
    """
    import torch

    module_name, colon, attribute = text.partition(":")
    if not colon or not attribute:
        raise ConfigError(
            f"{text!r} names no model; expected PACKAGE.MODULE:CALLABLE, such as torchvision.models:resnet50"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`: the user's module lies there
    try:
        made = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"cannot make the model {text!r}: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"{text!r} makes a {type(made).__name__}, not a torch.nn.Module")
    return made


def make_input(text: str) -> torch.Tensor:
    """Return an example input of `1x3x224x224` or `1x128:int64`, zeros. Raises ConfigError."""
    import torch

    match = _INPUT.fullmatch(text)
    if not match or (match[2] or "float32") not in ITEM_BYTES:
        raise ConfigError(f"{text!r} is no input; expected sizes and a dtype, such as 2x3x224x224 or 2x128:int64")
    return torch.zeros([int(size) for size in match[1].split("x")], dtype=getattr(torch, match[2] or "float32"))

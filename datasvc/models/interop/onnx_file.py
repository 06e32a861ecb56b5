"""Exports a model version to ONNX: loads its weights into a torch module, which torch's exporter converts."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.models.interop.whole_folder import check_target, create_folder
from datasvc.models.restoring.fit import LoadReport
from datasvc.models.restoring.load_into_module import load_version_into
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.repository import Repository, Resolved

if TYPE_CHECKING:
    import torch

ONNX_FILE: Final = "model.onnx"
_INPUT = re.compile(r"(\d+(?:x\d+)*)(?::([a-z0-9_]+))?")
_PACKAGES: Final = ("onnx", "onnxscript")


@dataclass(frozen=True)
class OnnxExport:
    """Result of an ONNX export.

    Attributes:
        version: version that was exported.
        files: paths of `model.onnx`, and of the file with its weights if these are too large for `model.onnx`.
        loaded: report on the tensors of the module that were loaded from the version.
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
    trusted_keys: Sequence[str | Path] | None = None,
) -> OnnxExport:
    """Load a version into a module, and write that module as `model.onnx`.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        folder: local folder; must be empty or not exist.
        model: module of the right architecture. Its tensors are overwritten, and it is set to evaluation mode.
        inputs: an example of each input.
        prefix: key of the module's tensors in the state.
        rename: new names of tensors, see `name_filter.map_names`.
        dynamic_batch: whether the first dimension of every input may have any size. If so, this dimension must be 2
            or more in the examples.
        trusted_keys: see `restore.read_version`.

    Raises:
        ConfigError: onnx is not installed, the folder is not writable, the version does not fit the module, or torch
            cannot convert it to ONNX.
        NotFoundError, CorruptDataError, UnavailableError: see `load_into_module.load_version_into`.
    """
    import torch

    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"an export to ONNX needs {' and '.join(missing)}: {how_to_install('onnx')}")
    target = Path(folder)
    check_target(target)
    version = repository.resolve("models", ref)
    loaded = load_version_into(
        repository, model, str(version), prefix=prefix, rename=rename, trusted_keys=trusted_keys
    )
    model.eval()
    dynamic_shapes = None
    if dynamic_batch:
        # A scalar input has no batch dimension, so its shape is static.
        dynamic_shapes = tuple({0: torch.export.Dim.DYNAMIC} if example.dim() else None for example in inputs)
    with create_folder(target) as temporary:
        _convert(model, tuple(inputs), temporary / ONNX_FILE, dynamic_shapes)
        files = tuple(target / file.name for file in sorted(temporary.iterdir()))
    return OnnxExport(version, files, loaded)


def _convert(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, dynamic_shapes: Any) -> None:
    """Write and sync the file, and that of its weights. Raise ConfigError: torch cannot convert the module."""
    import torch

    try:
        torch.onnx.export(model, inputs, path, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise ConfigError(
            f"torch cannot export {type(model).__name__} to ONNX: {lines[0] if lines else error!r}"
        ) from error
    # torch does not sync the files that it writes, but `create_folder` requires synced files.
    for file in path.parent.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def make_model(text: str) -> torch.nn.Module:
    """Import and call `PACKAGE.MODULE:CALLABLE`, and return the torch module that it creates.

    This runs the code that `text` names: call it only with a text that the user wrote on the command line.

    Raises:
        ConfigError: the callable cannot be imported or called, or returns something other than a module.
    """
    import torch

    module_name, colon, attribute = text.partition(":")
    if not colon or not attribute:
        raise ConfigError(
            f"{text!r} is not a valid model; expected PACKAGE.MODULE:CALLABLE, such as torchvision.models:resnet50"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # like `python -m`: the user's module may be in the working folder
    try:
        model = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"cannot create the model {text!r}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{text!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    return model


def make_input(text: str) -> torch.Tensor:
    """Return zeros as an example input, of the shape and dtype in `text`: `1x3x224x224` (float32) or `1x128:int64`.

    Raises:
        ConfigError: the text does not have this form, or the dtype is not supported.
    """
    import torch

    match = _INPUT.fullmatch(text)
    if not match or (match[2] or "float32") not in ITEM_BYTES:
        raise ConfigError(
            f"{text!r} is not a valid input; expected sizes and a dtype, such as 2x3x224x224 or 2x128:int64"
        )
    return torch.zeros(
        [int(size) for size in match[1].split("x")], dtype=getattr(torch, match[2] or "float32"), device="cpu"
    )

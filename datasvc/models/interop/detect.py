"""Which format a file or folder is in, told by what is in it; names and endings decide nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.models.interop.dcp_folders import METADATA_FILE, read_dcp_folder
from datasvc.models.interop.safetensors_files import SUFFIX, read_safetensors, read_safetensors_folder
from datasvc.models.interop.state import ForeignState
from datasvc.models.interop.torch_files import CHECKPOINT_FILE, LEGACY, ZIP, read_torch_file

_HEAD_BYTES: Final = 16


def read_foreign(source: Path) -> ForeignState:
    """Return the state in a file or folder of any format that can be imported.

    Raises:
        NotFoundError: nothing is there.
        ConfigError: none of the formats, or what only running code from the file could make.
        CorruptDataError: damaged.
        UnavailableError: it cannot be read.
    """
    try:
        return _read_folder(source) if source.is_dir() else _read_file(source)
    except FileNotFoundError as error:
        raise NotFoundError(f"nothing is at {error.filename or source}") from error
    except OSError as error:
        raise UnavailableError(f"cannot read {source}: {error}") from error


def _read_folder(folder: Path) -> ForeignState:
    if (folder / METADATA_FILE).is_file():
        return read_dcp_folder(folder)
    names = sorted(file.name for file in folder.iterdir())
    if any(name.endswith(SUFFIX) for name in names) or f"model{SUFFIX}.index.json" in names:
        return read_safetensors_folder(folder)
    if CHECKPOINT_FILE in names:
        return read_torch_file(folder / CHECKPOINT_FILE)
    raise ConfigError(
        f"{folder} is no model: expected {SUFFIX} files, a DCP folder with {METADATA_FILE}, or {CHECKPOINT_FILE}; "
        f"it has: {', '.join(names[:10]) or 'nothing'}. A file of torch.save is named itself"
    )


def _read_file(path: Path) -> ForeignState:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((ZIP, LEGACY)):
        return read_torch_file(path)
    if head[8:9] == b"{" or path.suffix == SUFFIX:
        return read_safetensors(path)
    raise ConfigError(
        f"{path} is neither a safetensors file nor one of torch.save: it begins with {head[:8].hex(' ') or 'nothing'}"
    )

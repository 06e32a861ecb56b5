"""A checkpoint as files that need no datasvc: safetensors and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from datasvc import durable
from datasvc.errors import ConfigError
from datasvc.models.checkpoint import Checkpoint
from datasvc.models.tree import flatten

TENSORS_FILE, STATE_FILE, ENTRY_FILE = "tensors.safetensors", "state.json", "entry.json"


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """Write a restored checkpoint as `tensors.safetensors`, `state.json` and `entry.json`.

    Args:
        checkpoint: from `restore`.
        folder: made when missing; must be empty.

    Returns:
        The files, the entry last: where it is, the others are complete.

    Raises:
        ConfigError: the folder is a file or not empty, or cannot be written; or safetensors lacks a tensor's dtype.
    """
    from safetensors.torch import save

    skeleton, tensors = flatten(checkpoint.state)
    try:
        packed = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    except KeyError as error:
        raise ConfigError(
            f"safetensors cannot hold tensors of {error}; read them with datasvc.open().restore()"
        ) from error
    contents = {
        TENSORS_FILE: packed,
        STATE_FILE: json.dumps(skeleton, indent=2).encode(),
        ENTRY_FILE: json.dumps(dict(checkpoint.entry), indent=2, sort_keys=True).encode(),
    }
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder, nothing is overwritten")
        durable.make_folder(folder)
        for name, content in contents.items():
            durable.write_file(folder / name, content)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}") from error
    return [folder / name for name in contents]

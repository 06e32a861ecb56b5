"""A restored checkpoint as files that need no datasvc: safetensors and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from datasvc import durable
from datasvc.models.checkpoint import Checkpoint
from datasvc.models.foreign.safetensors_files import ENTRY_FILE, STATE_FILE, TENSORS_FILE, write_safetensors
from datasvc.models.foreign.whole_folder import filling
from datasvc.models.loading import spec_of
from datasvc.models.tree import flatten

_GROUP_BYTES: Final = 256 << 20


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """Write a restored checkpoint as `tensors.safetensors`, `state.json` and `entry.json`: all of them, or nothing.

    Args:
        checkpoint: from `restore`.
        folder: made when missing; must be empty.

    Returns:
        The files, the entry last.

    Raises:
        ConfigError: the folder is a file or not empty, or may not be written; or safetensors lacks a tensor's dtype.
        UnavailableError: the disk is full, or fails.
    """
    skeleton, tensors = flatten(checkpoint.state)
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    with filling(folder) as temporary:
        write_safetensors(
            temporary / TENSORS_FILE,
            specs,
            lambda names: {name: tensors[name].detach().cpu() for name in names},
            group_bytes=_GROUP_BYTES,
        )
        durable.write_file(temporary / STATE_FILE, json.dumps(skeleton, indent=2).encode())
        durable.write_file(
            temporary / ENTRY_FILE, json.dumps(dict(checkpoint.entry), indent=2, sort_keys=True).encode()
        )
    return [folder / name for name in (TENSORS_FILE, STATE_FILE, ENTRY_FILE)]

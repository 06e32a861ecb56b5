"""A restored checkpoint as files that need no datasvc: safetensors and JSON."""

from __future__ import annotations

from pathlib import Path

from datasvc.models.interop.safetensors_files import ENTRY_FILE, STATE_FILE, TENSORS_FILE, write_checkpoint
from datasvc.models.interop.whole_folder import filling
from datasvc.models.restoring.checkpoint import Checkpoint
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.tensors.state_tree import flatten


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
        write_checkpoint(
            temporary,
            specs,
            lambda names: {name: tensors[name].detach().cpu() for name in names},
            skeleton,
            checkpoint.entry,
        )
    return [folder / name for name in (TENSORS_FILE, STATE_FILE, ENTRY_FILE)]

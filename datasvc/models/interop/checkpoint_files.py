"""Write a restored checkpoint as safetensors and JSON files, which can be read without datasvc."""

from __future__ import annotations

from pathlib import Path

from datasvc.models.interop.safetensors_files import ENTRY_FILE, STATE_FILE, TENSORS_FILE, write_checkpoint
from datasvc.models.interop.whole_folder import create_folder
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.restoring.restore import Checkpoint
from datasvc.models.tensors.state_tree import flatten


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """Write a restored checkpoint atomically as `tensors.safetensors`, `state.json` and `entry.json`.

    Args:
        checkpoint: result of `restore`.
        folder: folder to write to; must be empty or not exist.

    Returns:
        The paths of the files; the entry is the last one.

    Raises:
        ConfigError: the folder is a file, is not empty or not writable, or safetensors does not support the dtype of
            a tensor.
        UnavailableError: the disk is full or fails.
    """
    skeleton, tensors = flatten(checkpoint.state)
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    with create_folder(folder) as temporary:
        write_checkpoint(
            temporary,
            specs,
            lambda names: {name: tensors[name].detach().cpu() for name in names},
            skeleton,
            checkpoint.entry,
        )
    return [folder / name for name in (TENSORS_FILE, STATE_FILE, ENTRY_FILE)]

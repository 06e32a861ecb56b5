"""The checkpoint folder that `transformers.Trainer` resumes from, written from the state of a version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.integrations.run_checkpoints import RANK_STATE

with explain_missing("datasvc.integrations.transformers"):
    import torch
    from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.utils import WEIGHTS_NAME

# The parts of a version, and the file of the folder that `Trainer` reads each of them from.
_FILES: Final = {
    "model": WEIGHTS_NAME,
    "optimizer": OPTIMIZER_NAME,
    "lr_scheduler": SCHEDULER_NAME,
    "scaler": SCALER_NAME,
}
_RANDOM_FILE: Final = re.compile(r"rng_state(_[0-9]+)?\.pth")
TRAINER_STATE: Final = "trainer_state"


def write_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a version as a checkpoint folder, in place of an earlier one.

    Raises:
        ConfigError: the folder has files that this function does not write; `Trainer` would read some of them in
            place of the version's.
    """
    _clear(folder)
    for part, file in _FILES.items():
        if part in state:
            torch.save(state[part], folder / file)
    (folder / TRAINER_STATE_NAME).write_text(state[TRAINER_STATE], encoding="utf-8")
    for rank, random_state in enumerate(state[RANK_STATE]):
        torch.save(_for_trainer(random_state), folder / f"rng_state_{rank}.pth")
    torch.save(_for_trainer(state[RANK_STATE][0]), folder / "rng_state.pth")  # of a job of one rank


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paths, own = sorted(folder.iterdir()), {*_FILES.values(), TRAINER_STATE_NAME}
    others = [path.name for path in paths if path.name not in own and not _RANDOM_FILE.fullmatch(path.name)]
    if others:
        raise ConfigError(
            f"{folder} has files that fetch did not write: {', '.join(others[:5])}; give another folder"
        )
    for path in paths:
        path.unlink()


def _for_trainer(state: Any) -> dict[str, Any]:
    """Return random states of datasvc as `Trainer` reads them from a file."""
    kind, keys, *rest = state["numpy"]
    found = {"python": state["python"], "numpy": (kind, np.asarray(keys, np.uint32), *rest), "cpu": state["torch"]}
    return found | ({"cuda": state["cuda"]} if "cuda" in state else {})

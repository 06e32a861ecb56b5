"""Mixed precision: what is computed in 16 bits, and the loss scale that keeps small gradients from vanishing.

Weights, gradients on the wire and optimizer states stay float32 (Micikevicius et al. 2018, arXiv:1710.03740).
bfloat16 has float32's range and needs no scale. float16's gradients are scaled up before the backward pass; they are
unscaled and looked through for infinities after they were summed over the ranks, so that every rank sees the same and
all skip the step, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass computes in `precision` where that is safe; CPU and GPU alike."""
    kind = _TYPES[precision]
    return torch.autocast(device.type, dtype=kind, enabled=kind is not None)


def make_loss_scale(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scale of a run: one that moves for fp16, and one that does nothing otherwise."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def load_loss_scale(scale: torch.amp.GradScaler, state: Mapping[str, Any]) -> None:
    """Go on from a checkpoint's loss scale. A run that was not fp16 until now has none, and begins one."""
    if state and scale.is_enabled():
        scale.load_state_dict(dict(state))

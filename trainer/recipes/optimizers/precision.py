"""Mixed precision: autocast to 16 bits, and the loss scale that prevents underflow of float16 gradients.

Weights, all-reduced gradients and optimizer states stay float32 (Micikevicius et al. 2018, arXiv:1710.03740).
bfloat16 has the range of float32 and needs no loss scale. With float16, the gradients of the scaled loss are divided
by the scale and checked for infinities after the all-reduce. All ranks then check the same values, so either every
rank skips the step or none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16", "fp16"]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the forward pass uses `precision` for all operations that torch autocasts."""
    import torch

    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_loss_scale(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return a dynamic loss scale for "fp16"; for other precisions, a disabled one."""
    import torch

    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def load_loss_scale(scale: torch.amp.GradScaler, state: Mapping[str, Any]) -> None:
    """Load the loss scale of a checkpoint. Unless both the checkpoint and this run are "fp16", `scale` is kept."""
    # A disabled scale saves an empty state, which an enabled scale cannot load.
    if state and scale.is_enabled():
        scale.load_state_dict(dict(state))

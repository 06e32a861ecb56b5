"""Scratch memory for fusion: allocated once per dtype and device, grown when needed, reused for ever."""

import torch
from torch import Tensor


class FusionBuffers:
    """Hands out the same memory again and again: one user at a time, until its next ``take`` of that kind."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
        """An uninitialised contiguous ``dtype[num_elements]`` on the device."""
        buffer = self._buffers.get((dtype, device))
        if buffer is None or buffer.numel() < num_elements:
            buffer = self._buffers[dtype, device] = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements]

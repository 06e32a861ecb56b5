"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    Rises linearly over `warmup_steps` (Goyal et al. 2017), then falls along half a cosine to zero at
    `total_steps` (Loshchilov and Hutter 2017).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))

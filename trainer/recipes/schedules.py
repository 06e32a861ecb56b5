"""Learning rates as pure functions of how much was learned from: so they survive a resize of the job."""

from __future__ import annotations

import math


def warmup_cosine(progress: float, *, epochs: float, warmup_epochs: float, peak: float) -> float:
    """Return the rate of a step.

    Rises linearly over `warmup_epochs` (Goyal et al. 2017), then falls along half a cosine to zero at `epochs`
    (Loshchilov and Hutter 2017).

    Args:
        progress: epochs served once the step is done, with the share of the current one.
        epochs: of the whole run.
        warmup_epochs: of the warm-up.
        peak: highest rate.
    """
    if progress < warmup_epochs:
        return peak * progress / warmup_epochs
    share = (progress - warmup_epochs) / max(epochs - warmup_epochs, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))

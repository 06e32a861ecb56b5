"""How the learning rate follows the size of the global batch."""

from __future__ import annotations

import math
from typing import Literal, get_args

from datasvc.errors import ConfigError

RateScaling = Literal["none", "linear", "sqrt"]
RATE_SCALINGS: tuple[str, ...] = get_args(RateScaling)


def scale_rate(rate: float, *, rule: str, global_batch: int, reference_batch: int) -> float:
    """Return the rate for a global batch from the one that was found at a reference batch.

    "linear" multiplies it by the ratio of the batches (Goyal et al. 2017, section 2.1: "0.1 kn / 256"), "sqrt" by its
    root, which keeps the variance of the steps (Krizhevsky 2014; You et al. 2019 for LAMB), "none" leaves it alone.
    What is scaled is the rate, never the loss: with weight decay the two differ (Goyal et al., remark 1).

    Args:
        rate: at the reference batch.
        rule: one of `RATE_SCALINGS`.
        global_batch: samples of a step, over all ranks.
        reference_batch: samples of the step that `rate` is for.

    Raises:
        ConfigError: no such rule, or a batch is below 1.
    """
    if global_batch < 1 or reference_batch < 1:
        raise ConfigError(f"batches are {global_batch} and {reference_batch}; expected at least 1")
    ratio = global_batch / reference_batch
    match rule:
        case "none":
            return rate
        case "linear":
            return rate * ratio
        case "sqrt":
            return rate * math.sqrt(ratio)
    raise ConfigError(f"rate_scaling is {rule!r}; expected one of {', '.join(RATE_SCALINGS)}")

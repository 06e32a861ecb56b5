"""Scaling of the learning rate with the size of the global batch."""

from __future__ import annotations

import math
from typing import Literal, get_args

from datasvc.errors import ConfigError

RateScaling = Literal["none", "linear", "sqrt"]
RATE_SCALINGS: tuple[str, ...] = get_args(RateScaling)


def scale_rate(rate: float, *, rule: str, global_batch: int, reference_batch: int) -> float:
    """Return the learning rate for a global batch, scaled from the rate for a reference batch.

    "linear" multiplies the rate by the ratio of the batch sizes (Goyal et al. 2017, section 2.1: "0.1 kn / 256");
    "sqrt" by its root, which keeps the variance of the steps (Krizhevsky 2014; You et al. 2019 for LAMB);
    "none" returns it unchanged. The rate is scaled, never the loss: with weight decay the two differ (Goyal et al.,
    remark 1).

    Args:
        rate: learning rate for `reference_batch`.
        rule: one of `RATE_SCALINGS`.
        global_batch: samples per step over all ranks.
        reference_batch: samples per step for which `rate` was chosen.

    Raises:
        ConfigError: `rule` does not exist, or a batch size is below 1.
    """
    if global_batch < 1 or reference_batch < 1:
        raise ConfigError(
            f"global batch is {global_batch} and reference batch is {reference_batch}; expected at least 1 for both"
        )
    ratio = global_batch / reference_batch
    match rule:
        case "none":
            return rate
        case "linear":
            return rate * ratio
        case "sqrt":
            return rate * math.sqrt(ratio)
    raise ConfigError(f"rate_scaling is {rule!r}; expected one of {', '.join(RATE_SCALINGS)}")

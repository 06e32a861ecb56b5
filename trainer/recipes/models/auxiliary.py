"""What a model with auxiliary classifiers gives while it trains, and how its losses become one.

In evaluation such a model gives plain logits, as every other; a loop that takes its loss through `combine_losses` and
its predictions through `main_logits` need not know which model it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class LogitsWithAuxiliary(NamedTuple):
    """Logits of a model in training, and those of its auxiliary classifiers.

    Attributes:
        logits: `[batch, classes]`, what predicts.
        auxiliary: the same shape each, the classifier nearest to the input first.
        weight: of each auxiliary loss in the sum; the main one has 1.
    """

    logits: torch.Tensor
    auxiliary: tuple[torch.Tensor, ...]
    weight: float


def main_logits(output: torch.Tensor | LogitsWithAuxiliary) -> torch.Tensor:
    """Return the logits that predict, whichever of the two a model gave."""
    return output.logits if isinstance(output, LogitsWithAuxiliary) else output


def combine_losses(
    output: torch.Tensor | LogitsWithAuxiliary, loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the loss of a model's output: that of its logits, plus its auxiliary ones with their weight.

    Args:
        output: what the model gave.
        loss: of one tensor of logits; what it is measured against is its own affair.
    """
    total = loss(main_logits(output))
    if isinstance(output, LogitsWithAuxiliary):
        for logits in output.auxiliary:
            total = total + output.weight * loss(logits)
    return total

"""The training output of models with auxiliary classifiers, and the sum of the losses of all classifiers.

In evaluation, these models return only logits, as other models do. A training loop that uses `combine_losses` and
`main_logits` works with both kinds of output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class LogitsWithAuxiliary(NamedTuple):
    """The output of a model in training: the logits of its main and auxiliary classifiers.

    Attributes:
        logits: `[batch, classes]`, logits of the main classifier.
        auxiliary: logits of the auxiliary classifiers, each `[batch, classes]`, ordered from input to output.
        weight: weight of each auxiliary loss; the main loss has weight 1.
    """

    logits: torch.Tensor
    auxiliary: tuple[torch.Tensor, ...]
    weight: float


def main_logits(output: torch.Tensor | LogitsWithAuxiliary) -> torch.Tensor:
    """Return the logits of the main classifier for either kind of output."""
    return output.logits if isinstance(output, LogitsWithAuxiliary) else output


def combine_losses(
    output: torch.Tensor | LogitsWithAuxiliary, loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the main loss plus the weighted auxiliary losses; `loss` gets logits, `[batch, classes]`."""
    total = loss(main_logits(output))
    if isinstance(output, LogitsWithAuxiliary):
        for logits in output.auxiliary:
            total = total + output.weight * loss(logits)
    return total

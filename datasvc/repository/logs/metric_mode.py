"""Derive from the name of a metric whether a high or a low value is better; an unclear name is an error.

The name must have a word of known direction, such as `loss`, followed only by neutral words: `val/loss`,
`error_rate`. With another word after it, the name may mean another quantity (`loss_scale`). A negation or a number
before it may reverse the direction (`neg_loss`, `1-accuracy`). For these names the user must give the mode, because a
guess could make a retention policy remove the best versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from datasvc.errors import ConfigError

MetricMode = Literal["max", "min"]

# Words for which a lower or a higher value is better, and others. A pattern must match a whole word, in lower case.
_LOWER: Final = re.compile(r"loss(es)?|perplexity|ppl|err(ors?)?|nll|r?mse|mae|wer|cer|xent")
_HIGHER: Final = re.compile(r"acc(uracy)?|top\d+|precision|recall|f1|auc|auroc|m?iou|dice|bleu|psnr|ssim")
_NEUTRAL: Final = re.compile(
    r"train(ing)?|val(id(ation)?)?|test|dev|eval(uation)?|ema|mean|avg|average|total|rate|percent|epoch|step|score|at|\d+"
)
_NEGATING: Final = re.compile(r"neg(ated|ative)?|minus|inv(erse|erted)?|no[tn]?|without")
# "valLoss" and "MSELoss" are two words each, "top1" and "F1" are one. `_SPLIT_TOP_K` first turns "top_1" into "top1".
_WORD: Final = re.compile(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*|\d+")
_SPLIT_TOP_K: Final = re.compile(r"(?i)(?<![a-z])top[\W_]?(\d+)")


def choose_metric_mode(
    metric: str, given: str | None = None, *, option: str = "--mode", advice: str | None = None
) -> MetricMode:
    """Return "max" if a high value of a metric is better, "min" if a low value is better.

    Args:
        metric: name of the metric.
        given: mode that the user set; it overrides the name.
        option: command-line option that sets the mode, for the error message.
        advice: advice for the error message, in place of the option; None if there is an option.

    Raises:
        ConfigError: the name is unclear, or `given` is neither "max" nor "min".
    """
    if given in {"max", "min"}:
        return cast("MetricMode", given)
    if given is not None:
        raise ConfigError(f"{given!r} is not a valid mode for {metric}; expected 'max' or 'min'")
    mode = _direction(metric)
    if mode is None:
        name = option.lstrip("-").replace("-", "_")
        raise ConfigError(
            f"the name {metric!r} does not show whether a high or a low value is better: "
            + (advice or f"give {option} max or {option} min ({name}='max' or {name}='min' in Python)")
        )
    return mode


def _direction(metric: str) -> MetricMode | None:
    """Return the mode that the name of a metric shows, by the rules at the top; None if it is unclear."""
    words = [word.lower() for word in _WORD.findall(_SPLIT_TOP_K.sub(r"top\1", metric))]
    directed = [index for index, word in enumerate(words) if _mode_of(word) is not None]
    modes = {_mode_of(words[index]) for index in directed}
    if len(modes) != 1 or any(map(_NEGATING.fullmatch, words)):
        return None
    # A number after the word is a parameter, as in "acc@1". A number before it makes a formula, as in "1-accuracy".
    if any(word.isdigit() for word in words[: directed[0]]):
        return None
    after = [word for word in words[directed[0] :] if _mode_of(word) is None]
    return modes.pop() if all(map(_NEUTRAL.fullmatch, after)) else None


def _mode_of(word: str) -> MetricMode | None:
    if _LOWER.fullmatch(word):
        return "min"
    return "max" if _HIGHER.fullmatch(word) else None


def finite_metrics(metrics: Any) -> dict[str, float]:
    """Return the finite numbers in the metrics of an entry, because NaN and infinity cannot be ordered."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in items
        # An integer of JSON may be too large for a float.
        if (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 1023)
    }


def rank_by_metric(scores: Mapping[int, Mapping[str, float]], metric: str, mode: MetricMode) -> list[int]:
    """Return the numbers of the entries that have a metric, best first; equal ones are ordered newest first.

    Args:
        scores: result of `finite_metrics` for each entry, by its number.
        metric: name of the metric.
        mode: whether a high or a low value is better.
    """
    sign = -1 if mode == "max" else 1
    return sorted(
        (number for number, score in scores.items() if metric in score),
        key=lambda number: (sign * scores[number][metric], -number),
    )

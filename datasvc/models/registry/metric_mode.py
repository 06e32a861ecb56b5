"""Whether a high or a low value of a metric is better, by the words of its name; never a guess.

The name ends in a word of known direction, but for words that leave the direction alone: `val/loss`, `error_rate`. A
word after it of any other meaning makes another quantity of it (`loss_scale`), and so may a negation or a number
before it (`neg_loss`, `1-accuracy`): then the user has to say.
"""

from __future__ import annotations

import re
from typing import Final, Literal, cast

from datasvc.errors import ConfigError

MetricMode = Literal["max", "min"]

# Whole words, in lower case.
_LOWER: Final = re.compile(r"loss(es)?|perplexity|ppl|err(ors?)?|nll|r?mse|mae|wer|cer|xent")
_HIGHER: Final = re.compile(r"acc(uracy)?|top\d+|precision|recall|f1|auc|auroc|m?iou|dice|bleu|psnr|ssim")
_NEUTRAL: Final = re.compile(
    r"train(ing)?|val(id(ation)?)?|test|dev|eval(uation)?|ema|mean|avg|average|total|rate|percent|epoch|step|score|at|\d+"
)
_NEGATING: Final = re.compile(r"neg(ated|ative)?|minus|inv(erse|erted)?|no[tn]?|without")
# "valLoss" and "MSELoss" are two words each, "top1" and "F1" are one; "top_1" is joined before.
_WORD: Final = re.compile(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*|\d+")
_SPLIT_TOP_K: Final = re.compile(r"(?i)(?<![a-z])top[\W_]?(\d+)")


def choose_metric_mode(metric: str, given: str | None = None, *, option: str = "--mode") -> MetricMode:
    """Return "max" where a high value of a metric is better, "min" where a low one is.

    Args:
        metric: its name; "val_loss", "eval.top5" and "ErrorRate" speak for themselves.
        given: what the user says; goes before the name.
        option: by which the user says it, for the message.

    Raises:
        ConfigError: the name does not tell, or `given` is neither.
    """
    if given in {"max", "min"}:
        return cast("MetricMode", given)
    if given is not None:
        raise ConfigError(f"{given!r}: whether a high or a low {metric} is better is 'max' or 'min'")
    found = _direction(metric)
    if found is None:
        name = option.lstrip("-").replace("-", "_")
        raise ConfigError(
            f"the name {metric!r} does not tell whether a high or a low value is better: give {option} max or "
            f"{option} min ({name}='max' or {name}='min' in Python)"
        )
    return found


def _direction(metric: str) -> MetricMode | None:
    words = [word.lower() for word in _WORD.findall(_SPLIT_TOP_K.sub(r"top\1", metric))]
    known = [index for index, word in enumerate(words) if _mode_of(word) is not None]
    modes = {_mode_of(words[index]) for index in known}
    if len(modes) != 1 or any(map(_NEGATING.fullmatch, words)):
        return None
    # A number behind is a place or a count, "acc@1"; one before makes a formula of the name, "1-accuracy".
    if any(word.isdigit() for word in words[: known[0]]):
        return None
    after = [word for word in words[known[0] :] if _mode_of(word) is None]
    return modes.pop() if all(map(_NEUTRAL.fullmatch, after)) else None


def _mode_of(word: str) -> MetricMode | None:
    if _LOWER.fullmatch(word):
        return "min"
    return "max" if _HIGHER.fullmatch(word) else None

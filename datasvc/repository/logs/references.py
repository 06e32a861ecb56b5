"""References to versions, and the rules for valid names and tags, which become folders of the repository.

A reference is `NAME`, `NAME@3`, `NAME@tag`, or `NAME@tag~1`: the version to which the tag pointed before its last
move. `NAME@latest` is the newest version, unless there is a tag of this name. `NAME@best:METRIC` is the version with
the best value of a metric; no tag can have this name, because a tag has no colon.

Of a data set, `NAME` is the newest version of the main line, and `NAME@branch` that of a branch; `NAME@branch~1` is
the version that this one continues. Tags and branches have one space of names.

Where samples are read, `REFERENCE[SELECTION]` is a view of that version: see `datasvc.shards.views`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from datasvc.errors import ConfigError, NotFoundError

LATEST = "latest"
_MAX_NAME_LENGTH = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{_MAX_NAME_LENGTH - 1}}}")
# DOTALL: the name of a metric may be any text.
_BEST = re.compile(r"best:(?P<metric>.+?)(:(?P<mode>max|min))?", re.DOTALL)
_MAX_DIGITS = 18
_MOVES = re.compile(r"[0-9]{1,9}")


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


@dataclass(frozen=True)
class Reference:
    """A parsed reference. Without `version` and `tag`, it refers to the newest version.

    Attributes:
        tag: name of a tag or branch; or "latest" or "best:METRIC", which refer to a version without a tag.
        metric: metric whose best value defines the version.
        mode: whether a high or a low value of `metric` is better; None: derived from its name.
        moves_back: number of moves of the tag, or versions of the branch, to go back; 0 is its present version.
    """

    name: str
    version: int | None = None
    tag: str | None = None
    metric: str | None = None
    mode: MetricMode | None = None
    moves_back: int = 0


def is_name(name: str) -> bool:
    """Return whether `name` is a valid name of a data set, model or tag."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, what: str) -> str:
    """Return `name` if it is valid, otherwise raise ConfigError. Messages call its kind `what`, such as "tag"."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name of a {what}: use lower-case letters, digits, '.', '_' and '-', "
            f"a letter or digit first, at most {_MAX_NAME_LENGTH} characters"
        )
    return name


def check_tag(tag: str, what: str = "tag") -> str:
    """Return `tag` if it is a valid name and not a number, otherwise raise ConfigError; `what`: see `check_name`."""
    if tag.isdecimal():
        raise ConfigError(f"{tag!r} is not a valid {what}: NAME@NUMBER is a version; use a name with a letter")
    return check_name(tag, what)


@dataclass(frozen=True)
class LineName:
    """What a new version of a data set is committed to: the main line, or a branch."""

    name: str
    branch: str | None = None

    def __str__(self) -> str:
        return self.name if self.branch is None else f"{self.name}@{self.branch}"


def parse_line(text: str) -> LineName:
    """Parse `NAME` or `NAME@BRANCH`. Raise ConfigError if `text` is neither."""
    reference = parse_reference(text)
    if reference.version is not None or reference.metric is not None or reference.moves_back:
        raise ConfigError(
            f"{text!r} is one version, and a new version is committed to a whole line: give {reference.name}, or "
            f"{reference.name}@BRANCH"
        )
    return LineName(reference.name, reference.tag)


def refuse_text(values: object, argument: str, what: str = "references") -> None:
    """Raise ConfigError if `values`, an argument that must be a list of `what`, is one string."""
    # A string is a sequence of strings too: without this check, each of its letters would be an element.
    if isinstance(values, str):
        raise ConfigError(f"{argument} is the string {values!r}; expected a list of {what}, such as [{values!r}]")


def parse_reference(text: str, what: str = "data set") -> Reference:
    """Parse `NAME[@VERSION|@TAG[~MOVES]|@best:METRIC[:max|:min]]`; for `what`, see `check_name`.

    Raises ConfigError if `text` is no such reference.
    """
    if "[" in text:
        raise ConfigError(
            f"{text!r} selects a part of the samples of a version, and a whole version is expected here: leave out "
            "[...]"
        )
    name, at, version_or_tag = text.partition("@")
    check_name(name, what)
    if not at:
        return Reference(name)
    if version_or_tag.isascii() and version_or_tag.isdecimal() and version_or_tag.strip("0"):
        digits = version_or_tag.lstrip("0")
        if len(digits) > _MAX_DIGITS:  # Python refuses to convert thousands of digits
            raise ConfigError(
                f"{name}@{digits[:20]}... has {len(digits)} digits, which no version number has; give one that "
                f"`datasvc log {name}` lists"
            )
        return Reference(name, version=int(digits))
    if best := _BEST.fullmatch(version_or_tag):
        return Reference(
            name, tag=version_or_tag, metric=best["metric"], mode=cast("MetricMode | None", best["mode"])
        )
    tag, tilde, moves = version_or_tag.partition("~")
    check_tag(tag)
    if tilde and not _MOVES.fullmatch(moves):
        raise ConfigError(
            f"{text!r} is not a valid reference; expected a number after ~, such as {name}@{tag}~1 for the version "
            "before the tag's last move"
        )
    return Reference(name, tag=tag, moves_back=int(moves) if tilde else 0)


def split_selection(text: str) -> tuple[str, str | None]:
    """Split `REFERENCE[SELECTION]`, a view of a version, into both; without a selection, return None for it.

    Raises ConfigError if the text does not end with the bracket.
    """
    reference, bracket, rest = text.partition("[")
    if not bracket:
        return text, None
    if not rest.endswith("]") or not rest[:-1].strip():
        raise ConfigError(f"{text!r} is no reference to a view; expected one such as pets@3[label != 'cat']")
    return reference, rest[:-1].strip()


def split_words(text: str) -> list[str]:
    """Split references at white space that is not in the brackets of a selection.

    A bracket in quotes does not count. Raises ConfigError if a bracket is not closed.
    """
    words: list[str] = []
    quote, depth, start = "", 0, None
    for index, letter in enumerate(f"{text} "):
        if letter.isspace() and not depth:
            words += [] if start is None else [text[start:index]]
            start = None
            continue
        start = index if start is None else start
        if quote or (depth and letter in "'\""):
            quote = ("" if letter == quote else quote) if quote else letter
        elif letter in "[]":
            depth = max(0, depth + (1 if letter == "[" else -1))
    if depth:
        raise ConfigError(f"{text!r} has a bracket that is not closed; a view is written NAME@VERSION[CONDITION]")
    return words


# The name must have a word of known direction, such as `loss`, followed only by neutral words: `val/loss`,
# `error_rate`. With another word after it, the name may mean another quantity (`loss_scale`). A negation or a number
# before it may reverse the direction (`neg_loss`, `1-accuracy`). For these names the user must give the mode, because
# a guess could make a retention policy remove the best versions.


def choose_metric_mode(
    metric: str, given: str | None = None, *, option: str = "--mode", advice: str | None = None
) -> MetricMode:
    """Return "max" if a high value of a metric is better, "min" if a low value is better.

    Args:
        metric: name of the metric.
        given: mode that the user set; it overrides the name.
        option: command-line option that sets the mode, for the error message.
        advice: advice for the error message, in place of the option.

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

    `scores` has the `finite_metrics` of each entry, by its number.
    """
    sign = -1 if mode == "max" else 1
    return sorted(
        (number for number, score in scores.items() if metric in score),
        key=lambda number: (sign * scores[number][metric], -number),
    )


def find_best(scores: Mapping[int, Mapping[str, float]], reference: Reference) -> int:
    """Return the version of a model with the best value of the metric of `reference`; for `scores`, see above.

    Raises:
        NotFoundError: no version has the metric.
        ConfigError: no mode is given or known for this metric.
    """
    name, metric = reference.name, str(reference.metric)
    known_metrics = sorted({known for score in scores.values() for known in score})
    if metric not in known_metrics:
        raise NotFoundError(
            f"no version of {name} has a finite metric {metric!r}, so none is the best; there are: "
            f"{', '.join(known_metrics) or 'none'}"
        )
    advice = (
        f"write {name}@best:{metric}:max or {name}@best:{metric}:min (mode='max' or mode='min' of `repo.models.best`)"
    )
    return rank_by_metric(scores, metric, choose_metric_mode(metric, reference.mode, advice=advice))[0]

"""References to versions, and the rules for valid names and tags, which become folders of the repository.

A reference is `NAME`, `NAME@3`, `NAME@tag`, or `NAME@tag~1`: the version to which the tag pointed before its last
move. `NAME@latest` is the newest version, unless there is a tag of this name. `NAME@best:METRIC` is the version with
the best value of a metric; no tag can have this name, because a tag has no colon.

Of a data set, `NAME` is the newest version of the main line, and `NAME@branch` that of a branch; `NAME@branch~1` is
the version that this one continues. Tags and branches have one space of names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from datasvc.errors import ConfigError
from datasvc.repository.logs.metric_mode import MetricMode

LATEST = "latest"
_MAX_NAME_LENGTH = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{_MAX_NAME_LENGTH - 1}}}")
# DOTALL: the name of a metric may be any text.
_BEST = re.compile(r"best:(?P<metric>.+?)(:(?P<mode>max|min))?", re.DOTALL)
_MAX_DIGITS = 18
_MOVES = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Reference:
    """A parsed reference. Without `version` and `tag`, it refers to the newest version.

    Attributes:
        name: name of a data set or model.
        version: number of a version.
        tag: name of a tag or branch; or "latest" or "best:METRIC", which refer to a version without a tag.
        metric: metric whose best value defines the version.
        mode: whether a high or a low value of `metric` is better; None: derived from its name, see `metric_mode`.
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
    """What a new version of a data set is committed to: the main line, or a branch.

    Attributes:
        name: name of the data set.
        branch: name of the branch; None: the main line.
    """

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

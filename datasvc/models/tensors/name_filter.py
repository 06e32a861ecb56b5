"""Selects tensors by name patterns, and renames them by name maps, for partial restores, imports and exports."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from datasvc.errors import ConfigError

REGEX_PREFIX: Final = "re:"
_SHOWN_NAMES = 3


@dataclass(frozen=True)
class NameRule:
    r"""One step of a name map.

    Attributes:
        old: a name, or a prefix of whole segments: "model.head" matches "model.head" and "model.head.weight", not
            "model.header". After `re:` a regular expression that may match anywhere in a name.
        new: replacement; "" removes a prefix and its dot. For a regular expression, a template such as "\1.weight".
    """

    old: str
    new: str

    def __post_init__(self) -> None:
        if not self.old.removeprefix(REGEX_PREFIX):
            raise ConfigError(f"the name map {self.old}={self.new} has no old name; write OLD=NEW")
        if self.is_regex:
            try:
                # Checks the template too, even without a match.
                re.compile(self._expression).sub(self.new, "")
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"the name map {self.old}={self.new} is not a valid regular expression: {error}"
                ) from error

    @property
    def is_regex(self) -> bool:
        """Whether `old` is a regular expression."""
        return self.old.startswith(REGEX_PREFIX)

    @property
    def _expression(self) -> str:
        return self.old.removeprefix(REGEX_PREFIX)

    def matches(self, name: str) -> bool:
        """Return whether the rule applies to `name`."""
        if self.is_regex:
            return re.search(self._expression, name) is not None
        return is_below(name, self.old)

    def apply(self, name: str) -> str:
        """Return the new name of `name`; `name` itself if the rule does not match."""
        if not self.matches(name):
            return name
        if self.is_regex:
            return re.sub(self._expression, self.new, name)
        remainder = name.removeprefix(self.old.rstrip(".")).removeprefix(".")
        return ".".join(part for part in (self.new.rstrip("."), remainder) if part)


def parse_name_map(texts: Iterable[str]) -> dict[str, str]:
    """Parse `OLD=NEW` texts to a name map in their order. Raises ConfigError: another form, or an old name twice."""
    name_map: dict[str, str] = {}
    for text in texts:
        # Split at the last "=": the expression may contain one, a tensor's name does not.
        old, equals, new = text.rpartition("=") if text.startswith(REGEX_PREFIX) else text.partition("=")
        if not equals or not old:
            raise ConfigError(
                f"{text!r} is not a valid name map; expected OLD=NEW, such as model.backbone=model.body"
            )
        if old in name_map:
            raise ConfigError(f"the name map has {old!r} twice; give each old name once")
        name_map[old] = new
    return name_map


def is_below(name: str, prefix: str) -> bool:
    """Return whether `name` is `prefix`, or begins with it and a dot. Every name is below ""."""
    stem = prefix.rstrip(".")
    return not stem or name == stem or name.startswith(f"{stem}.")


def select_names(names: Sequence[str], only: Collection[str] = (), exclude: Collection[str] = ()) -> list[str]:
    """Return the selected names, in their order.

    Args:
        names: dotted names.
        only: one or several patterns with `*`, `?` and `[...]`, where `*` matches dots too; a pattern without these
            is a name or a prefix of whole segments. Empty: every name.
        exclude: patterns of names to leave out.

    Raises:
        ConfigError: a pattern matches no name (the message has similar names), or no name is left.
    """
    only, exclude = ((patterns,) if isinstance(patterns, str) else patterns for patterns in (only, exclude))
    for pattern in (*only, *exclude):
        if not any(_matches(name, pattern) for name in names):
            raise ConfigError(f"no tensor matches {pattern!r}; {_nearest(pattern, names)}")
    chosen = [
        name
        for name in names
        if (not only or any(_matches(name, pattern) for pattern in only))
        and not any(_matches(name, pattern) for pattern in exclude)
    ]
    if not chosen and names and exclude:
        raise ConfigError(f"nothing is left of {len(names)} tensors without {', '.join(map(repr, exclude))}")
    return chosen


def map_names(names: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Return the new name of every name, by old name.

    Each item of `rename` is a rule: its key is `NameRule.old`, its value `NameRule.new`. The rules are applied in
    order, each to the results of the one before.

    Raises:
        ConfigError: a rule matches no name, a new name is empty, or two new names are equal.
    """
    mapped = {name: name for name in names}
    for old, new in (rename or {}).items():
        rule = NameRule(old, new)
        if not any(map(rule.matches, mapped.values())):
            raise ConfigError(f"the name map {old}={new} matches no tensor; {_nearest(old, list(mapped.values()))}")
        mapped = {name: rule.apply(current) for name, current in mapped.items()}
    _check_distinct(mapped)
    return mapped


def _check_distinct(mapped: Mapping[str, str]) -> None:
    taken: dict[str, str] = {}
    for old, new in mapped.items():
        if not new:
            raise ConfigError(f"the name map leaves an empty name for {old!r}; map it to a name")
        if new in taken:
            raise ConfigError(f"the name map makes {taken[new]!r} and {old!r} both {new!r}; names must stay distinct")
        taken[new] = old


def _matches(name: str, pattern: str) -> bool:
    # Compare first: a name may contain brackets, which are special in a pattern.
    if name == pattern:
        return True
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return is_below(name, pattern)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    if not names:
        return "there are no tensors"
    near = difflib.get_close_matches(pattern.removeprefix(REGEX_PREFIX), names, n=_SHOWN_NAMES, cutoff=0.3)
    return f"there are {len(names)}, such as {', '.join(map(repr, near or names[:_SHOWN_NAMES]))}"

"""Which tensors of a state are meant, and by which names they go: patterns and name maps over dotted names."""

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
        old: a whole name, or a prefix of whole segments: "model.head" means "model.head" and "model.head.weight", not
            "model.header". Starting with `re:`, a regular expression, searched for anywhere in a name.
        new: what stands there instead; empty takes a prefix away, its dot too. Of an expression, a template with
            groups: "\1".
    """

    old: str
    new: str

    def __post_init__(self) -> None:
        if not self.old.removeprefix(REGEX_PREFIX):
            raise ConfigError(f"the name map {self.old}={self.new} says nothing of what to map")
        if self.is_regex:
            try:
                re.compile(self._expression).sub(self.new, "")  # reads the template too, match or not
            except (re.error, IndexError) as error:
                raise ConfigError(f"the name map {self.old}={self.new} is no regular expression: {error}") from error

    @property
    def is_regex(self) -> bool:
        """Whether `old` is a regular expression."""
        return self.old.startswith(REGEX_PREFIX)

    @property
    def _expression(self) -> str:
        return self.old.removeprefix(REGEX_PREFIX)

    def matches(self, name: str) -> bool:
        """Return whether the rule says something of `name`."""
        if self.is_regex:
            return re.search(self._expression, name) is not None
        return is_below(name, self.old)

    def apply(self, name: str) -> str:
        """Return what `name` becomes; itself where the rule does not match."""
        if not self.matches(name):
            return name
        if self.is_regex:
            return re.sub(self._expression, self.new, name)
        rest = name.removeprefix(self.old.rstrip(".")).removeprefix(".")
        return ".".join(part for part in (self.new.rstrip("."), rest) if part)


def parse_name_map(texts: Iterable[str]) -> dict[str, str]:
    """Return `OLD=NEW` texts as a name map, in their order. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in texts:
        # A regular expression may hold "=": the last one divides, as no tensor's name has one.
        old, equals, new = text.rpartition("=") if text.startswith(REGEX_PREFIX) else text.partition("=")
        if not equals or not old:
            raise ConfigError(f"{text!r} is no name map; expected OLD=NEW, such as model.backbone=model.body")
        if old in found:
            raise ConfigError(f"the name map has {old!r} twice")
        found[old] = new
    return found


def is_below(name: str, prefix: str) -> bool:
    """Return whether `name` is `prefix` or lies below it, segment by segment. Everything lies below ""."""
    whole = prefix.rstrip(".")
    return not whole or name == whole or name.startswith(f"{whole}.")


def select_names(names: Sequence[str], only: Collection[str] = (), exclude: Collection[str] = ()) -> list[str]:
    """Return the names that are meant, in their order.

    Args:
        names: dotted names.
        only: a pattern or several, with `*`, `?` and `[...]`, where `*` crosses dots; without any of these a whole
            name or a prefix of whole segments. Empty: every name.
        exclude: patterns likewise, of names to leave out.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left: says which names are near.
    """
    only, exclude = ((each,) if isinstance(each, str) else each for each in (only, exclude))
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
    """Return what every name becomes, by old name.

    Args:
        names: dotted names.
        rename: old names, prefixes or expressions, see `NameRule`; applied one after the other, each to what the one
            before gave.

    Raises:
        ConfigError: a rule matches no name, a name would become empty, or two names would become one.
    """
    mapped = {name: name for name in names}
    for old, new in (rename or {}).items():
        rule = NameRule(old, new)
        if not any(map(rule.matches, mapped.values())):
            raise ConfigError(f"the name map {old}={new} matches no tensor; {_nearest(old, list(mapped.values()))}")
        mapped = {name: rule.apply(now) for name, now in mapped.items()}
    _check_distinct(mapped)
    return mapped


def _check_distinct(mapped: Mapping[str, str]) -> None:
    taken: dict[str, str] = {}
    for old, new in mapped.items():
        if not new:
            raise ConfigError(f"the name map leaves no name for {old!r}")
        if new in taken:
            raise ConfigError(f"the name map makes {taken[new]!r} and {old!r} both {new!r}")
        taken[new] = old


def _matches(name: str, pattern: str) -> bool:
    if name == pattern:  # which may have a bracket in it
        return True
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return is_below(name, pattern)


def _nearest(wanted: str, names: Sequence[str]) -> str:
    if not names:
        return "there are no tensors"
    near = difflib.get_close_matches(wanted.removeprefix(REGEX_PREFIX), names, n=_SHOWN_NAMES, cutoff=0.3)
    return f"there are {len(names)}, such as {', '.join(map(repr, near or names[:_SHOWN_NAMES]))}"

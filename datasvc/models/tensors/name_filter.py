"""Selects tensors by name patterns, and renames them by name maps, for partial restores, imports and exports.

A name is the dotted path of a tensor in the state tree, and a segment is a part between dots. A name map is a list of
rules that are applied in order, each to all names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from datasvc.errors import ConfigError
from datasvc.printable import count_text

REGEX_PREFIX: Final = "re:"
_SHOWN_NAMES = 3


@dataclass(frozen=True)
class NameRule:
    r"""One rule of a name map.

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
                # `sub` checks the template too, even without a match.
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
        """Return whether `old` matches `name`."""
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
        # Either part may be empty: `new` if the rule removes the prefix, `remainder` if `old` is the whole name.
        return ".".join(part for part in (self.new.rstrip("."), remainder) if part)


def parse_name_map(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts `OLD=NEW` to a name map in the same order.

    Raises ConfigError: a text has another form, or an old name occurs twice.
    """
    name_map: dict[str, str] = {}
    for text in texts:
        # Split a regular expression at the last "=", because the expression may contain "=" too.
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
    """Return whether `name` is `prefix`, or begins with it and a dot. Every name is below "".

    A dot at the end of `prefix` is ignored.
    """
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
    # Accept a single pattern as a string too: a string would count as a collection of its characters.
    only, exclude = ((patterns,) if isinstance(patterns, str) else patterns for patterns in (only, exclude))
    for pattern in (*only, *exclude):
        if not any(_matches(name, pattern) for name in names):
            raise ConfigError(f"no tensor matches {pattern!r}; {_nearest(pattern, names)}")
    chosen = [name for name in names if is_selected(name, only, exclude)]
    # Without `exclude`, at least one name is chosen, because each pattern of `only` matches a name.
    if not chosen and names and exclude:
        raise ConfigError(
            f"nothing is left of {count_text(len(names), 'tensor')} without {', '.join(map(repr, exclude))}"
        )
    return chosen


def is_selected(name: str, only: Collection[str] = (), exclude: Collection[str] = ()) -> bool:
    """Return whether patterns select a name; see `select_names`."""
    only, exclude = ((patterns,) if isinstance(patterns, str) else patterns for patterns in (only, exclude))
    if only and not any(_matches(name, pattern) for pattern in only):
        return False
    return not any(_matches(name, pattern) for pattern in exclude)


def map_names(names: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Return the new name of every name, by old name.

    `rename` is a name map: each item is a rule, with `NameRule.old` as key and `NameRule.new` as value. The rules are
    applied in order, each to the results of the one before.

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
    """Raise ConfigError if a new name is empty, or two new names are equal."""
    old_names: dict[str, str] = {}
    for old, new in mapped.items():
        if not new:
            raise ConfigError(f"the name map leaves an empty name for {old!r}; map it to a name")
        if new in old_names:
            raise ConfigError(
                f"the name map makes {old_names[new]!r} and {old!r} both {new!r}; names must stay distinct"
            )
        old_names[new] = old


def _matches(name: str, pattern: str) -> bool:
    # Compare first: a name may contain brackets, which are special in a pattern.
    if name == pattern:
        return True
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return is_below(name, pattern)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Return the end of an error message: the names that are most similar to a pattern, or else the first names."""
    if not names:
        return "there are no tensors"
    near = difflib.get_close_matches(pattern.removeprefix(REGEX_PREFIX), names, n=_SHOWN_NAMES, cutoff=0.3)
    return f"there are {len(names)}, such as {', '.join(map(repr, near or names[:_SHOWN_NAMES]))}"

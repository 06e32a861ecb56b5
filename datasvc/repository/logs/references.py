"""How people name things: `NAME`, `NAME@3`, `NAME@tag`, and `NAME@tag~1` for where a tag stood one move ago."""

from __future__ import annotations

import re
from dataclasses import dataclass

from datasvc.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_MAX_NAME_LENGTH = 128
_MOVES = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Reference:
    """A parsed reference. With neither `version` nor `tag` it means the newest version.

    Attributes:
        name: of a data set or model.
        version: its number.
        tag: or a tag of it.
        moves_back: where the tag stood that many moves ago; 0 is now.
    """

    name: str
    version: int | None = None
    tag: str | None = None
    moves_back: int = 0


def is_name(name: str) -> bool:
    """Return whether `name` may name a data set, model or tag."""
    return bool(_NAME.fullmatch(name)) and len(name) <= _MAX_NAME_LENGTH


def check_name(name: str, what: str) -> str:
    """Return `name` when it may name a `what` ("data set", "model", "tag"). Raises ConfigError."""
    if not is_name(name):
        raise ConfigError(
            f"{name!r} cannot name a {what}: use lower-case letters, digits, '.', '_' and '-', "
            f"a letter or digit first, at most {_MAX_NAME_LENGTH} characters"
        )
    return name


def check_tag(tag: str) -> str:
    """Return `tag` when it may name a tag: a name that is not a number. Raises ConfigError."""
    if tag.isdecimal():
        raise ConfigError(f"{tag!r} cannot be a tag: NAME@{tag} would mean version {tag}")
    return check_name(tag, "tag")


def parse_reference(text: str, what: str = "data set") -> Reference:
    """Return the parts of `NAME[@VERSION|@TAG[~MOVES]]`. Raises ConfigError when it is not one."""
    name, at, rest = text.partition("@")
    check_name(name, what)
    if not at:
        return Reference(name)
    if rest.isascii() and rest.isdecimal() and int(rest) > 0:
        return Reference(name, version=int(rest))
    tag, tilde, moves = rest.partition("~")
    check_tag(tag)
    if tilde and not _MOVES.fullmatch(moves):
        raise ConfigError(f"{text!r} is no reference: {name}@{tag}~1 is where the tag stood one move ago")
    return Reference(name, tag=tag, moves_back=int(moves) if tilde else 0)

"""What all groups of settings share: how a field states its choices, its range and its unit, and the check of these.

A group is a frozen dataclass. Help texts come from the `Attributes:` of its docstring, and everything else from the
types of its fields: `Annotated[int, Metavar("SAMPLES"), Range(1)]`. A field with the type `Literal["a", "b"]`
accepts these values only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from datasvc.errors import ConfigError


@dataclass(frozen=True)
class Metavar:
    """What `--help` shows for the values of a setting.

    Attributes:
        text: unit of a number, such as "PIXELS", or the kind of a value, such as "FOLDER"; one word per member of a
            tuple of fixed length.
    """

    text: str


@dataclass(frozen=True)
class Range:
    """The range of a number, or of each number of a tuple: `minimum <= value < below`.

    Attributes:
        minimum: smallest value.
        below: end of the range; it is not part of it.
    """

    minimum: float
    below: float = math.inf

    def describe(self, name: str) -> str:
        """Return the range of the setting `name` as a part of a sentence."""
        if self.below < math.inf:
            return f"{self.minimum} <= {name} < {self.below}"
        return f"at least {self.minimum}" if self.minimum else "a finite number, not below 0"


@dataclass(frozen=True)
class Words:
    """Marks a string that consists of words: its option takes several, and joins them by spaces."""


@dataclass(frozen=True)
class FieldType:
    """The type of a setting, taken apart.

    Attributes:
        kind: `bool`, `int`, `float` or `str`; for a tuple, the type of its members.
        length: number of members of a tuple; None for any number of members; 0 if the setting is no tuple.
        choices: permitted values; empty for any.
        metavar: unit or kind of the values for `--help`; empty if the type states none.
        range: range of a number; None for any number.
        is_optional: whether None is a value of the setting.
        is_words: whether a string consists of words; see `Words`.
    """

    kind: type
    length: int | None = 0
    choices: tuple[str, ...] = ()
    metavar: str = ""
    range: Range | None = None
    is_optional: bool = False
    is_words: bool = False

    @property
    def is_tuple(self) -> bool:
        """Whether the setting has several values."""
        return self.length != 0


@dataclass(frozen=True, kw_only=True)
class SettingGroup:
    """Settings of one subject.

    Attributes:
        title: title of the group in `--help` and `--show-config`.
    """

    title: ClassVar[str]

    def check(self) -> None:
        """Check what the types of this group's fields do not state. Must not import torch.

        Raises:
            ConfigError: a setting has a wrong form, or does not go with another one of the group.
        """


def check_group(config: SettingGroup, group: type[SettingGroup]) -> None:
    """Check the settings of a group: choices and ranges of each field, and the group's own checks.

    Raises:
        ConfigError: a value is out of range, or does not go with another one.
    """
    for name, field_type in field_types(group).items():
        value = getattr(config, name)
        if value is None and field_type.is_optional:
            continue
        if field_type.choices and value not in field_type.choices:
            raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(field_type.choices)}")
        if field_type.range is not None:
            numbers = value if field_type.is_tuple else (value,)
            # Written with `all` and `not`, so that NaN is refused too.
            if not all(field_type.range.minimum <= number < field_type.range.below for number in numbers):
                raise ConfigError(f"{name} is {value}; expected {field_type.range.describe(name)}")
    group.check(config)


def field_types(group: type[SettingGroup]) -> dict[str, FieldType]:
    """Return the type of each field of a group, by name."""
    hints = typing.get_type_hints(group, include_extras=True)
    return {field.name: _take_apart(hints[field.name]) for field in dataclasses.fields(group)}


@contextlib.contextmanager
def naming(name: str, value: object) -> Iterator[None]:
    """Add the name and value of a setting to the message of a ConfigError that the block raises."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from error


def _take_apart(hint: Any) -> FieldType:
    metavar, number_range, is_words = "", None, False
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        metavar = next((note.text for note in notes if isinstance(note, Metavar)), "")
        number_range = next((note for note in notes if isinstance(note, Range)), None)
        is_words = Words() in notes
    is_optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    if is_optional:
        hint = next(member for member in typing.get_args(hint) if member is not type(None))
    length: int | None = 0
    if typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        length = None if members[-1] is Ellipsis else len(members)
        hint = members[0]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return FieldType(str if choices else hint, length, choices, metavar, number_range, is_optional, is_words)

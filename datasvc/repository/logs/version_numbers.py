"""Sets of version numbers as text: `1-3,7` where they are stored, `1 to 3, 7` for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from datasvc.errors import CorruptDataError

_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SHOWN_SPANS: Final = 8


def encode_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as `1-3,7`: short for long runs of them."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans_of(numbers))


def decode_numbers(text: object, *, among: Iterable[int]) -> frozenset[int]:
    """Return those of `among` that the text names. So a text of a few bytes can never ask for much memory.

    Raises CorruptDataError: it is no such text.
    """
    spans = []
    for each in str(text).split(",") if text else []:
        match = _SPAN.fullmatch(each)
        if not match:
            raise CorruptDataError(f"{text!r} does not name versions: expected such as '1-3,7'")
        spans.append((int(match[1]), int(match[2] or match[1])))
    spans.sort(reverse=True)
    found = []
    for number in sorted(among):
        while spans and spans[-1][1] < number:
            spans.pop()
        if spans and spans[-1][0] <= number:
            found.append(number)
    return frozenset(found)


def describe_numbers(numbers: Iterable[int]) -> str:
    """Return numbers for people: `1 to 3, 7`; of very many runs only the first and the last."""
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in spans_of(numbers)]
    if len(shown) > _SHOWN_SPANS:
        half = _SHOWN_SPANS // 2
        shown = [*shown[:half], "...", *shown[-half:]]
    return ", ".join(shown) if shown else "none"


def spans_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, first and last of each, ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans

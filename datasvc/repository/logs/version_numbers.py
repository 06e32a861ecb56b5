"""Sets of version numbers as text: `1-3,7` in the entries of `removals`, `1 to 3, 7` in messages.

A *span* is a run of consecutive numbers, given by its first and its last number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from datasvc.errors import CorruptDataError

_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SHOWN_SPANS: Final = 8


def encode_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as text, with each span shortened, such as `1-3,7`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans_of(numbers))


def decode_numbers(text: object, *, among: Iterable[int]) -> frozenset[int]:
    """Return those numbers of `among` that are in `text`, a result of `encode_numbers`.

    The result is bounded by `among`, so that a damaged text such as `1-999999999` cannot use much memory.

    Raises:
        CorruptDataError: `text` is not in the form that `encode_numbers` returns.
    """
    spans = []
    for part in str(text).split(",") if text else []:
        match = _SPAN.fullmatch(part)
        if not match:
            raise CorruptDataError(f"{text!r} is not a list of versions; expected for example '1-3,7'")
        spans.append((int(match[1]), int(match[2] or match[1])))
    # Sort both numbers and spans, so that one pass is enough. The lowest span is the last one, for a fast `pop`.
    spans.sort(reverse=True)
    numbers = []
    for number in sorted(among):
        while spans and spans[-1][1] < number:
            spans.pop()  # it ends before `number`
        if spans and spans[-1][0] <= number:
            numbers.append(number)
    return frozenset(numbers)


def describe_numbers(numbers: Iterable[int]) -> str:
    """Return numbers for a message, such as `1 to 3, 7`; of many spans, only the first and the last ones."""
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in spans_of(numbers)]
    if len(shown) > _SHOWN_SPANS:
        half = _SHOWN_SPANS // 2
        shown = [*shown[:half], "...", *shown[-half:]]
    return ", ".join(shown) if shown else "none"


def spans_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the spans of `numbers` as (first, last), ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans

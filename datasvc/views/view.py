"""Facts of a value, described once; terminals, notebooks, reports and pages write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from datasvc.printable import text_value
from datasvc.sizes import format_size

Kind = Literal["text", "number", "bytes", "time", "digest", "datasets", "models", "runs"]


class FactPart(NamedTuple):
    """A part of a fact. The last three kinds are references: a page links them."""

    value: Any
    kind: Kind = "text"

    def __str__(self) -> str:
        if self.kind == "number":
            return f"{self.value:,}"
        return format_size(self.value) if self.kind == "bytes" else text_value(self.value)


@dataclass(frozen=True)
class Fact:
    """A fact of a value.

    Attributes:
        name: stable name; where a fact is a field of the value's JSON, that of the field.
        parts: the fact in words, numbers and references.
        help: what it means, where its name does not say it.
    """

    name: str
    parts: Sequence[FactPart]
    help: str = ""

    def __str__(self) -> str:
        return "".join(map(str, self.parts))


def fact(name: str, *parts: object, help: str = "") -> Fact:  # noqa: A002 - as in the class
    """Return a fact; what is no `FactPart` is text, and what is None or "" is left out."""
    given = [part if isinstance(part, FactPart) else FactPart(part) for part in parts if part is not None]
    return Fact(name, [part for part in given if part.value not in (None, "")], help)


def references(kind: Kind, refs: Iterable[str]) -> list[FactPart]:
    """Return references with commas between them."""
    parts = [part for ref in refs for part in (FactPart(", "), FactPart(ref, kind))]
    return parts[1:]


def fact_texts(facts: Iterable[Fact]) -> dict[str, str]:
    """Return facts as texts by name, without those that are not known."""
    return {each.name: str(each) for each in facts if each.parts}

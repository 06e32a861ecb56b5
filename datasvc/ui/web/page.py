"""The value of a page: what its template shows, and what its JSON twin returns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from datasvc.errors import ConfigError

# Python refuses to convert thousands of digits.
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Panel:
    """One answer on a page, and how to get the same answer without the page.

    Attributes:
        values: JSON values; if `command` has `--json`, those that it prints.
        command: command line that gives the answer; None if no command does.
        python: line of Python that gives the answer; None if there is none.
    """

    values: Any
    command: str | None = None
    python: str | None = None


@dataclass(frozen=True)
class Problem:
    """Something that needs attention.

    Attributes:
        text: what is wrong, what it means, and what to do, in the words of the command line's messages.
        link: address of the page with more about it; None if there is none.
        severity: "error", or "warning" for what is not yet harmful.
    """

    text: str
    link: str | None = None
    severity: str = "error"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON values."""
        return {"text": self.text, "severity": self.severity, "link": self.link}


@dataclass(frozen=True)
class Crumb:
    """One part of the breadcrumb: the last one is a reference that the command line accepts."""

    text: str
    link: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """The values of a page.

    Attributes:
        template: file name in `templates`.
        title: title of the window.
        section: entry of the navigation that is marked: "home", "datasets", "models", "runs", "cluster", "planner".
        crumbs: breadcrumb, outermost first.
        panels: answers by name; with the problems, the JSON twin of the page.
        problems: shown first; the panel "problems" of the JSON twin. Versions that were left out are added to them.
        view: further values for the template, such as links and drawings; not part of the JSON twin.
    """

    template: str
    title: str
    section: str
    crumbs: tuple[Crumb, ...] = ()
    panels: Mapping[str, Panel]
    problems: tuple[Problem, ...] = ()
    view: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RawResponse:
    """A response that is not a page, such as a thumbnail.

    Attributes:
        body: bytes of the response.
        media_type: such as "image/jpeg". It must not be HTML or another type that a browser executes.
        is_immutable: whether the address always gives these bytes, so that a browser may keep them.
    """

    body: bytes
    media_type: str
    is_immutable: bool = False


class Query(dict[str, str]):
    """The parameters in the address of a page, the last one of each name."""

    def text(self, name: str) -> str | None:
        """Return a parameter; None if it is absent or empty."""
        return self.get(name) or None

    def number(self, name: str, default: int, *, low: int = 0, high: int = 1 << 53) -> int:
        """Return a whole number from `low` to `high`. Raise ConfigError for anything else."""
        text = self.text(name)
        if text is None:
            return default
        if not _WHOLE_NUMBER.fullmatch(text) or not low <= int(text) <= high:
            raise ConfigError(f"{name}={text[:40]!r} is not valid; expected a whole number from {low} to {high}")
        return int(text)

    def decimal(self, name: str) -> float | None:
        """Return a finite number; None if it is absent. Raise ConfigError for anything else."""
        text = self.text(name)
        if text is None:
            return None
        with suppress(ValueError):
            if math.isfinite(number := float(text)):
                return number
        raise ConfigError(f"{name}={text[:40]!r} is not valid; expected a number")

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of `choices`, by default the first. Raise ConfigError for anything else."""
        text = self.text(name) or choices[0]
        if text not in choices:
            raise ConfigError(f"{name}={text[:40]!r} is not valid; expected one of {', '.join(choices)}")
        return text


Parts = Mapping[str, str]
"""The variable parts of a page's path, such as `{"ref": "pets@1"}`."""

"""`Finding`, the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        level: "problem" if something that was asked for cannot work; "warning" if it may fail or be slow.
        text: what was found.
        advice: what to do; "" if there is nothing to do.
    """

    check: str
    level: Level
    text: str
    advice: str = ""

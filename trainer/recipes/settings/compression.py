"""Parses the text form of a compression of gradients, such as "topk:0.01", without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasvc.errors import ConfigError

PLAIN = ("none", "fp16", "bf16")
"""The compressions without a number, which keep nothing between steps."""


@dataclass(frozen=True)
class CompressionChoice:
    """A compression of gradients.

    Attributes:
        name: name in `datasvc.trainer.Compression`.
        arguments: arguments of that compression; empty for those of `PLAIN`.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_memory(self) -> bool:
        """Whether ranks keep the unsent part of gradients for later steps."""
        return self.name not in PLAIN


def parse_compression(text: str) -> CompressionChoice:
    """Return the compression that a text describes.

    Args:
        text: "none", "fp16", "bf16"; "topk:SHARE" with 0 < SHARE <= 1; "powersgd:RANK" or "powersgd:RANK:STEPS", with
            STEPS steps without compression at the start.

    Raises:
        ConfigError: the text has another form, or a number is out of range.
    """
    name, *numbers = text.split(":")
    try:
        match name, numbers:
            case (("none" | "fp16" | "bf16"), []):
                return CompressionChoice(name)
            case "topk", [ratio] if 0 < float(ratio) <= 1:
                return CompressionChoice(name, {"ratio": float(ratio)})
            case "powersgd", [rank, *steps] if len(steps) < 2 and int(rank) >= 1 and all(int(n) >= 0 for n in steps):
                # Without compression in the first thousand steps, as by default in the library, short runs would
                # never compress.
                return CompressionChoice(name, {"rank": int(rank), "start_iteration": int(steps[0]) if steps else 0})
    except ValueError:
        pass  # a number that is none gets the same message
    raise ConfigError(
        f"compression is {text!r}; expected none, fp16, bf16, topk:SHARE with 0 < SHARE <= 1, such as topk:0.01, or "
        "powersgd:RANK, such as powersgd:2, or powersgd:RANK:STEPS, with STEPS steps without compression first"
    )

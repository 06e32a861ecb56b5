"""The group of settings of how the ranks combine their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from datasvc.errors import ConfigError
from datasvc.sizes import parse_size
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, SettingGroup, naming

_PLAIN: Final = ("none", "fp16", "bf16")  # the compressions without a number, which keep nothing between steps


@dataclass(frozen=True)
class CompressionChoice:
    """A compression of gradients.

    Attributes:
        name: name in `datasvc.trainer.Compression`.
        arguments: its arguments, by name; empty for those without a number.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_memory(self) -> bool:
        """Whether ranks keep the unsent part of gradients for later steps."""
        return self.name not in _PLAIN


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


@dataclass(frozen=True, kw_only=True)
class GradientSettings(SettingGroup):
    """How the ranks combine their gradients.

    Attributes:
        compression: what the ranks send of a gradient: "none": all of it; "fp16", "bf16": 16 bits of each number;
            "topk:0.01": this share of its numbers, the largest; "powersgd:2": two matrices of this rank;
            "powersgd:2:1000": the same after 1000 steps without compression. topk and powersgd send the rest later.
        op: "average": the step is made with the mean gradient of all ranks; "adasum": each rank makes a step with
            the mean gradient of its own samples, and the ranks combine these steps; needs a power of two ranks,
            without `elastic`.
        bucket: maximum size of the buckets in which gradients are sent, such as "4MiB"; "auto": chosen
            from measurements in the first steps; None: 25MiB.
    """

    title: ClassVar[str] = "gradients of the ranks"

    compression: Annotated[str, Metavar("{none,fp16,bf16,topk:SHARE,powersgd:RANK[:STEPS]}")] = "none"
    op: Literal["average", "adasum"] = "average"
    bucket: Annotated[str | None, Metavar("{auto,SIZE}")] = None

    def check(self) -> None:
        """Check the forms of compression and bucket, and that they go together and with what the ranks combine."""
        choice = self.parse_compression()
        if self.combines_steps and choice.has_memory:
            raise ConfigError(
                f"compression is {self.compression!r} and op is 'adasum', which combines steps of the ranks and not "
                "gradients, so no part can be sent later; give --compression none, fp16 or bf16, or --op average"
            )
        bucket = self.parse_bucket()
        if self.combines_steps and bucket is not None:
            raise ConfigError("op is 'adasum', which sends no buckets; leave out --bucket, or give --op average")
        if bucket == "auto" and choice.has_memory:
            raise ConfigError(
                f"compression is {self.compression!r}, whose bytes are not proportional to the size of a bucket, and "
                "bucket is 'auto'; give --bucket a size, or --compression none, fp16 or bf16"
            )

    @property
    def combines_steps(self) -> bool:
        """Whether each rank makes a step with its own gradient, and the ranks combine the steps."""
        return self.op == "adasum"

    def parse_compression(self) -> CompressionChoice:
        """Return the compression. Raises ConfigError: it has another form."""
        return parse_compression(self.compression)

    def parse_bucket(self) -> int | Literal["auto"] | None:
        """Return the maximum size of buckets in bytes, "auto", or None for the optimizer's default."""
        if self.bucket is None or self.bucket == "auto":
            return self.bucket  # type: ignore[return-value]  # "auto" as a literal
        with naming("bucket", self.bucket):
            return parse_size(self.bucket)

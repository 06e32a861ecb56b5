"""The group of settings of how the ranks combine their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.compression import CompressionChoice, parse_compression
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, SettingGroup


@dataclass(frozen=True, kw_only=True)
class GradientSettings(SettingGroup):
    """How the ranks combine their gradients.

    Attributes:
        compression: what the ranks send of a gradient: "none": all of it; "fp16", "bf16": 16 bits of each number;
            "topk:0.01": this share of its numbers, the largest; "powersgd:2": two matrices of this rank;
            "powersgd:2:1000": the same after as many steps without compression. The last three send the rest later.
        op: "average": the step is made with the mean gradient of all ranks; "adasum": each rank makes a step with
            the mean gradient of its own samples, and the ranks combine these steps; for a power of two ranks.
    """

    title: ClassVar[str] = "gradients of the ranks"

    compression: Annotated[str, Metavar("{none,fp16,bf16,topk:SHARE,powersgd:RANK}")] = "none"
    op: Literal["average", "adasum"] = "average"

    def check(self) -> None:
        """Check the form of the compression, and that it can send what the ranks combine."""
        choice = self.parse_compression()
        if self.combines_steps and choice.has_memory:
            raise ConfigError(
                f"compression is {self.compression!r} and op is 'adasum', which combines steps of the ranks and not "
                "gradients, so no part can be sent later; give --compression none, fp16 or bf16, or --op average"
            )

    @property
    def combines_steps(self) -> bool:
        """Whether each rank makes a step with its own gradient, and the ranks combine the steps."""
        return self.op == "adasum"

    def parse_compression(self) -> CompressionChoice:
        """Return the compression. Raises ConfigError: it has another form."""
        return parse_compression(self.compression)

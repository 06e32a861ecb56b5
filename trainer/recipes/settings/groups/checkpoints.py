"""The group of settings of the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.models.saving.save_policy import parse_duration, parse_policy
from datasvc.repository.logs.references import check_name
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(SettingGroup):
    """When and how a run saves its state.

    Attributes:
        name: model name of the checkpoints.
        checkpoint_every: steps between checkpoints; the end of the run always commits one.
        max_stall: maximum share of the training time that checkpoints take, such as "3%"; to stay below it,
            checkpoints are made less often. None: no limit.
        checkpoint_overlap: what happens to a checkpoint while earlier ones are being written: "queue" makes it wait
            once two are, "refuse" skips it.
        codec: storage of weights: "none": raw; "planes": compressed; "delta": the difference to the previous
            checkpoint, where that is smaller.
        grace: maximum time from SIGTERM or Ctrl-C to the end of the run, which saves a last checkpoint.
    """

    title: ClassVar[str] = "checkpoints"

    name: Annotated[str, Metavar("NAME")]
    checkpoint_every: Annotated[int, Metavar("STEPS"), Range(1)] = 1000
    max_stall: Annotated[str | None, Metavar("PERCENT")] = None
    # A test compares the choices with `OVERLAPS` and `CODECS`, whose modules import torch.
    checkpoint_overlap: Literal["queue", "refuse"] = "queue"
    codec: Literal["none", "planes", "delta"] = "delta"
    grace: Annotated[str, Metavar("DURATION")] = "30s"

    def check(self) -> None:
        """Check the name and the forms of share and duration."""
        check_name(self.name, "model")
        parse_policy(self.checkpoint_every, self.max_stall)
        parse_duration(self.grace)

"""The groups of settings of the checkpoints that a run saves, and of the one that it starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.models.saving.save_policy import parse_duration, parse_policy
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup, naming


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(SettingGroup):
    """When and how a run saves its state.

    Attributes:
        name: model name of the checkpoints.
        checkpoint_every: steps between checkpoints; the end of the run always commits one.
        max_stall: maximum share of the training time that checkpoints take, such as "3%"; to stay below it,
            checkpoints are made less often. None: no limit.
        checkpoint_overlap: what happens to a checkpoint while earlier ones are being written: "queue": it is
            written after them, and the run waits if there are two; "refuse": it is skipped.
        codec: storage of weights: "none": raw; "planes": compressed; "delta": the difference to the previous
            checkpoint, where that is smaller.
        grace: maximum time from SIGTERM or Ctrl-C to the end of the run, which saves a last checkpoint.
        local_checkpoints: folder on a disk of each node for checkpoints between those in the repository; each is kept
            on two nodes. A run that is started again continues the newest, also after the loss of a node. None: none.
        every_local: steps between two checkpoints on the disks of the nodes; less than `checkpoint_every`.
    """

    title: ClassVar[str] = "checkpoints"

    name: Annotated[str, Metavar("NAME")]
    checkpoint_every: Annotated[int, Metavar("STEPS"), Range(1)] = 1000
    max_stall: Annotated[str | None, Metavar("PERCENT")] = None
    # A test compares the choices with `OVERLAPS` and `CODECS`, whose modules import torch.
    checkpoint_overlap: Literal["queue", "refuse"] = "queue"
    codec: Literal["none", "planes", "delta"] = "delta"
    grace: Annotated[str, Metavar("DURATION")] = "30s"
    local_checkpoints: Annotated[str | None, Metavar("FOLDER")] = None
    every_local: Annotated[int | None, Metavar("STEPS"), Range(1)] = None

    def check(self) -> None:
        """Check the name, the forms of share and duration, and that the settings of the nodes go together."""
        check_name(self.name, "model")
        parse_policy(self.checkpoint_every, self.max_stall)
        parse_duration(self.grace)
        if (self.local_checkpoints is None) != (self.every_local is None):
            raise ConfigError(
                f"local_checkpoints is {self.local_checkpoints!r} and every_local is {self.every_local!r}; give both "
                "--local-checkpoints FOLDER and --every-local STEPS, or neither"
            )
        if self.local_checkpoints == "":
            raise ConfigError("local_checkpoints is empty; give a folder on a disk of the node, such as /nvme/ckpt")
        if self.every_local is not None and self.every_local >= self.checkpoint_every:
            raise ConfigError(
                f"every_local is {self.every_local} and checkpoint_every is {self.checkpoint_every}: each checkpoint "
                "in the repository is on the nodes too, so there would be none between two of them; give fewer steps "
                "for --every-local, or leave out --local-checkpoints"
            )


@dataclass(frozen=True, kw_only=True)
class StartSettings(SettingGroup):
    """Whether a run continues a version, or takes its weights.

    Attributes:
        resume: "auto" continues the newest version of `name` if there is one; "never" starts a new run; a model
            version such as "digits-cnn@3" continues that version.
        init_from: model version whose weights a new run starts with, such as "digits-cnn@3", for fine-tuning on other
            data; a run that continues a checkpoint ignores it. None: random weights.
        init_exclude: tensors that keep their random weights with `init_from`, such as "head": names, prefixes of
            whole segments, or patterns with `*`.
    """

    title: ClassVar[str] = "start of the run"

    resume: Annotated[str, Metavar("{auto,never,NAME@VERSION}")] = "auto"
    init_from: Annotated[str | None, Metavar("NAME@VERSION")] = None
    init_exclude: Annotated[tuple[str, ...], Metavar("TENSOR")] = ()

    def check(self) -> None:
        """Check the forms of the versions, and that at most one of them is given."""
        if self.resume not in ("auto", "never") and "@" not in self.resume:
            raise ConfigError(
                f"resume is {self.resume!r}; expected 'auto', 'never' or a version such as 'digits-cnn@3'"
            )
        with naming("resume", self.resume):
            parse_reference(self.resume, "model")
        if self.init_from is not None:
            with naming("init_from", self.init_from):
                parse_reference(self.init_from, "model")
            if self.resume not in ("auto", "never"):
                raise ConfigError(
                    f"resume is {self.resume!r} and init_from is {self.init_from!r}; give one of them: a run that "
                    "continues a version has its weights"
                )
        elif self.init_exclude:
            raise ConfigError("init_exclude names tensors of the version of --init-from; give that too")

"""The group of settings of the state that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import parse_reference
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, SettingGroup, naming


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

"""The group of settings of how the ranks of a job train together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class RankSettings(SettingGroup):
    """How the ranks of a job train together.

    Attributes:
        elastic: whether the run goes on when ranks fail, leave or join, for jobs that are started with `datasvc-run
            --min-num-proc`; see docs/how-to/elastic.md.
        commit_every: for an elastic run: steps between copies of the state to host memory. After a failure the
            remaining ranks repeat the steps since the newest copy.
    """

    title: ClassVar[str] = "ranks"

    elastic: bool = False
    commit_every: Annotated[int, Metavar("STEPS"), Range(1)] = 10

    def check(self) -> None:
        """Check that copies are made."""
        if not self.elastic and self.commit_every != RankSettings.commit_every:
            raise ConfigError(
                f"commit_every is {self.commit_every}, and only an elastic run copies its state; give --elastic, or "
                f"leave it at {RankSettings.commit_every}"
            )

"""The group of settings of the data that a run trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.repository.logs.references import parse_reference
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup, naming


@dataclass(frozen=True, kw_only=True)
class DataSettings(SettingGroup):
    """Which data a run trains on.

    Attributes:
        data: data-set reference, such as "digits@1"; resolved once, at the start of the run.
        repo: repository URL.
        vocabulary: size of the vocabulary of token data; all tokens are smaller.
        documents: whether attention and targets of token data stay within each document.
    """

    title: ClassVar[str] = "data"

    data: Annotated[str, Metavar("NAME@VERSION")]
    repo: Annotated[str, Metavar("URL")]
    vocabulary: Annotated[int | None, Metavar("TOKENS"), Range(1)] = None
    documents: bool = False

    def check(self) -> None:
        """Check the form of the reference."""
        with naming("data", self.data):
            parse_reference(self.data)

"""What torch calls a `checkpoint_id`, here: which repository, which model, which version."""

from __future__ import annotations

import os
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import parse_reference


@dataclass(frozen=True)
class CheckpointId:
    """What a `checkpoint_id` says; None where it says nothing.

    Attributes:
        url: of a repository.
        ref: "NAME", "NAME@3" or "NAME@tag".
    """

    url: str | None
    ref: str | None

    @classmethod
    def parse(cls, checkpoint_id: str | os.PathLike[str]) -> CheckpointId:
        """Return the parts of "NAME@3", of a path or URL (anything with a slash), or of "URL#NAME@3".

        Raises:
            ConfigError: it is none of these.
        """
        text = os.fspath(checkpoint_id)
        url, mark, ref = text.rpartition("#")
        if not mark:
            is_url = isinstance(checkpoint_id, os.PathLike) or "/" in text or os.sep in text
            url, ref = (text, "") if is_url else ("", text)
        if not url and not ref:
            raise ConfigError(
                f"{text!r} is no checkpoint_id: give NAME, NAME@VERSION, a repository's URL, or URL#NAME"
            )
        if ref:
            parse_reference(ref, "model")
        return cls(url or None, ref or None)


def is_checkpoint_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether `CheckpointId.parse` takes it."""
    try:
        CheckpointId.parse(checkpoint_id)
    except (ConfigError, TypeError):
        return False
    return True

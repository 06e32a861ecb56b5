"""Parses torch's `checkpoint_id`: with `DcpWriter` and `DcpReader` it names a repository, a model and a version."""

from __future__ import annotations

import os
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import parse_reference


@dataclass(frozen=True)
class CheckpointId:
    """Parts of a `checkpoint_id`: `url` of the repository; `ref`: NAME, NAME@3 or NAME@tag; None: not given."""

    url: str | None
    ref: str | None

    @classmethod
    def parse(cls, checkpoint_id: str | os.PathLike[str]) -> CheckpointId:
        """Parse "NAME@3", a path or URL (any text with a slash), or "URL#NAME@3".

        Raises:
            ConfigError: the text has none of these forms.
        """
        text = os.fspath(checkpoint_id)
        url, mark, ref = text.rpartition("#")
        if not mark:
            is_url = isinstance(checkpoint_id, os.PathLike) or "/" in text or os.sep in text
            url, ref = (text, "") if is_url else ("", text)
        if not url and not ref:
            raise ConfigError(
                f"{text!r} is not a valid checkpoint_id; give NAME, NAME@VERSION, a repository's URL, or URL#NAME"
            )
        if ref:
            parse_reference(ref, "model")
        return cls(url or None, ref or None)


class CheckpointIdMixin:
    """The methods that torch's readers and writers have for `checkpoint_id`.

    Attributes:
        url: URL of the repository.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self._checkpoint_id: str | os.PathLike[str] = path

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The `path`, or the last `checkpoint_id` that torch passed to `reset`."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` has a valid form."""
        try:
            CheckpointId.parse(checkpoint_id)
        except (ConfigError, TypeError):
            return False
        return True

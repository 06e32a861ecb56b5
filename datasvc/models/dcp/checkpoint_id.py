"""Parses the argument `checkpoint_id` of torch's `dcp.save` and `dcp.load`, for `DcpWriter` and `DcpReader`.

For these classes, a `checkpoint_id` names a repository, or a model or one of its versions, or both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import StorageMeta

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import parse_reference


@dataclass(frozen=True)
class CheckpointId:
    """Parts of a `checkpoint_id`; None for a part that is not given.

    Attributes:
        url: URL of the repository.
        ref: NAME, NAME@3 or NAME@tag.
    """

    url: str | None
    ref: str | None

    @classmethod
    def parse(cls, checkpoint_id: str | os.PathLike[str]) -> CheckpointId:
        """Parse "NAME@3", a path or URL (any text with a slash), or "URL#NAME@3".

        Raises:
            ConfigError: the text has none of these forms.
            TypeError: `checkpoint_id` is neither a text nor a path.
        """
        text = os.fspath(checkpoint_id)
        url, separator, ref = text.rpartition("#")
        if not separator:
            # The text is only one of the two parts. A name has no slash, so a text with a slash is a path or URL.
            is_url = isinstance(checkpoint_id, os.PathLike) or "/" in text or os.sep in text
            url, ref = (text, "") if is_url else ("", text)
        if not url and not ref:
            raise ConfigError(
                f"{text!r} is not a valid checkpoint_id; give NAME, NAME@VERSION, a repository's URL, or URL#NAME"
            )
        if ref:
            parse_reference(ref, "model")
        return cls(url or None, ref or None)


@dataclass
class VersionStorageMeta(StorageMeta):
    """Torch's ids of a save or load, and the version that was saved or read.

    Attributes:
        reference: the version as "URL#NAME@3", which `DcpReader` and `dcp.load` accept.
    """

    reference: str | None = None


class CheckpointIdMixin:
    """Implements the methods of torch's `StorageReader` and `StorageWriter` that concern `checkpoint_id`.

    Attributes:
        url: URL of the repository.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self._checkpoint_id: str | os.PathLike[str] = path

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The last `checkpoint_id` that torch passed to `reset`; `path` before the first."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` has a valid form."""
        try:
            CheckpointId.parse(checkpoint_id)
        except (ConfigError, TypeError):
            return False
        return True

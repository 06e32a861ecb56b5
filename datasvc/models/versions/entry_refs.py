"""Lists the objects that the entry of a model version names, for restore, verify, transfer and `gc`.

Also defines size limits of these objects, which writers and readers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import CorruptDataError
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

# Readers refuse larger objects, so that a damaged entry cannot exhaust the memory. The limit of the sharding allows
# as many blocks as a tensor table may have chunks.
MAX_SHARDING_BYTES: Final = 512 << 20
MAX_CODE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class EntryObjects:
    """Digests of the objects that an entry names. One of these objects, the tensor table, names further objects.

    Attributes:
        tensors: tensor table.
        state: state object, which has the skeleton.
        sharding: sharding of a save by several ranks; None for a save by one process.
        code: local changes of the code; None if there were none or they were not stored.
    """

    tensors: Digest
    state: Digest
    sharding: Digest | None
    code: Digest | None

    @property
    def all(self) -> tuple[Digest, ...]:
        """All digests, each once."""
        digests = (self.tensors, self.state, self.sharding, self.code)
        return tuple(dict.fromkeys(digest for digest in digests if digest is not None))


def objects_of_entry(content: Mapping[str, Any], version: object) -> EntryObjects:
    """Return the objects that the entry of a model version names; `version` is for messages.

    Raises CorruptDataError: a field is missing, or a value is not a digest.
    """
    try:
        sharding, code = content.get("sharding"), (content.get("code") or {}).get("diff")
        return EntryObjects(
            parse_digest(content["tensors"]),
            parse_digest(content["state"]),
            None if sharding is None else parse_digest(sharding),
            None if code is None else parse_digest(code),
        )
    except (KeyError, TypeError, AttributeError, CorruptDataError) as error:
        raise CorruptDataError(f"the entry of {version} does not name its tensors and state: {error!r}") from error

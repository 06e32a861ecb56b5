"""Which objects the entry of a model version names: everything that verifies, copies or keeps versions asks here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import CorruptDataError
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

# What a reader believes. Room for as many pieces as a tensor table has.
MAX_SHARDING_BYTES: Final = 512 << 20
MAX_CODE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class EntryObjects:
    """What an entry names beside what its tensor table names in turn.

    Attributes:
        tensors: the tensor table.
        state: the state's skeleton.
        sharding: how a sharded save was cut; None for one that a single process made.
        code: what differed from the checked out revision; None where nothing did, or nobody kept it.
    """

    tensors: Digest
    state: Digest
    sharding: Digest | None
    code: Digest | None

    @property
    def all(self) -> tuple[Digest, ...]:
        """Every object that is named, each once."""
        named = (self.tensors, self.state, self.sharding, self.code)
        return tuple(dict.fromkeys(digest for digest in named if digest is not None))


def objects_of_entry(content: Mapping[str, Any], version: object) -> EntryObjects:
    """Return what the entry of a model version names.

    Args:
        content: of the entry.
        version: whose it is, for messages.

    Raises:
        CorruptDataError: it does not say what it should, or something in it is no digest.
    """
    try:
        sharding, code = content.get("sharding"), (content.get("code") or {}).get("diff")
        return EntryObjects(
            parse_digest(content["tensors"]),
            parse_digest(content["state"]),
            None if sharding is None else parse_digest(sharding),
            None if code is None else parse_digest(code),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} does not say what its tensors are: {error!r}") from error

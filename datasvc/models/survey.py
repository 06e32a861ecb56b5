"""What model versions name, read and checked but for the bytes of their tensors: entries, tables, states, code.

Keeps a name and a size per object, not a record per tensor: tables are read again by those who need the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.models.checkpoint import decode_state
from datasvc.models.records import TensorRecord, decode_table
from datasvc.models.restore_report import shorten
from datasvc.models.signatures import check_signed
from datasvc.models.signing_keys import PublicKey
from datasvc.models.tree import unflatten
from datasvc.repository import Digest, Entry, Repository, Resolved
from datasvc.repository.objects import parse_digest

Role = Literal["entry", "tensor table", "state", "code", "tensors"]
Kind = Literal["missing", "changed", "contradictory", "not trusted"]


@dataclass(frozen=True)
class Problem:
    """One object or entry that is not what it should be.

    Attributes:
        kind: "contradictory" is as it was written, but says what cannot be; "not trusted" lacks a signature.
        role: what it is.
        digest: of the object; None for an entry.
        detail: what was expected and found, and where.
        hit: by version the tensors that cannot be restored; () where that is all of them, or the rest of the state.
    """

    kind: Kind
    role: Role
    digest: Digest | None
    detail: str
    hit: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        hit = "; ".join(f"{version}{f' {shorten(names)}' if names else ''}" for version, names in self.hit.items())
        return f"{self.role} is {self.kind}: {self.detail}; hit: {hit or 'no tensor'}"


class Survey:
    """Looks at versions one after the other. What they name gathers in `objects`, what is wrong in `problems`.

    Args:
        repository: where they are.
        trusted: keys by one of which every version must be signed, if there are any.

    Attributes:
        objects: that hold tensors, with the sizes that tables say.
        documents: tables, states and code that were read well, with their sizes.
    """

    def __init__(self, repository: Repository, trusted: Sequence[PublicKey] = ()) -> None:
        self._repository = repository
        self._trusted = trusted
        self.objects: dict[Digest, int] = {}
        self.documents: dict[Digest, int] = {}
        self._tables: dict[Digest, list[str]] = {}
        self._problems: dict[tuple[Role, Kind, Digest | str], tuple[str, dict[str, tuple[str, ...]]]] = {}

    @property
    def problems(self) -> list[Problem]:
        """What was found, each object once with all versions that it hits."""
        return [
            Problem(kind, role, parse_digest(which) if role != "entry" else None, detail, hit)
            for (role, kind, which), (detail, hit) in self._problems.items()
        ]

    def look_at(self, version: Resolved) -> None:
        """Read everything of a version but its tensors.

        Raises:
            ConfigError: something has a later format.
            UnavailableError: the store did not answer.
        """
        try:
            entry = self._repository.entry(version)
            table, state, code = _digests_of(entry)
        except (CorruptDataError, NotFoundError) as error:
            self._note("entry", kind_of(error), str(version), version, str(error))
            return
        if self._trusted:
            try:
                check_signed(self._repository, version, entry, self._trusted)
            except CorruptDataError as error:
                self._note("entry", "not trusted", str(version), version, str(error))
        if code is not None:
            self._read("code", code, version)
        skeleton, records = self._read("state", state, version), self._read_table(table, version)
        if skeleton is not None and records is not None:
            try:
                unflatten(
                    decode_state(skeleton, str(version)),
                    cast("Any", dict.fromkeys(record.name for record in records)),
                )
            except CorruptDataError as error:
                self._note("state", "contradictory", state, version, f"{version}: {error}")

    def records(self) -> Iterator[tuple[Sequence[str], TensorRecord]]:
        """Yield the records of every table that could be read, each with the versions that have it."""
        for table, versions in self._tables.items():
            yield from ((versions, record) for record in self._decode(table, self._repository.objects.read(table)))

    def _read_table(self, table: Digest, version: Resolved) -> Sequence[TensorRecord] | None:
        content = self._read("tensor table", table, version)
        if content is None:
            return None
        try:
            records = self._decode(table, content)
        except CorruptDataError as error:
            self._note("tensor table", "contradictory", table, version, str(error))
            return None
        if table not in self._tables:
            links = (link for record in records for piece in record.pieces for link in piece.chain)
            self.objects.update((link.object, link.object_bytes) for link in links)
        self._tables.setdefault(table, []).append(str(version))
        return records

    def _decode(self, table: Digest, content: bytes) -> Sequence[TensorRecord]:
        return decode_table(content, self._repository.objects.location(table))

    def _read(self, role: Role, digest: Digest, version: Resolved) -> bytes | None:
        try:
            content = self._repository.objects.read(digest)
        except (CorruptDataError, NotFoundError) as error:
            self._note(role, kind_of(error), digest, version, str(error))
            return None
        self.documents[digest] = len(content)
        return content

    def _note(self, role: Role, kind: Kind, which: str, version: Resolved, detail: str) -> None:
        self._problems.setdefault((role, kind, which), (detail, {}))[1][str(version)] = ()


def kind_of(error: DatasvcError) -> Kind:
    """Return what an error says of an object."""
    return "missing" if isinstance(error, NotFoundError) else "changed"


def _digests_of(entry: Entry) -> tuple[Digest, Digest, Digest | None]:
    """Return the table, the state and the code that an entry names. Raises CorruptDataError."""
    content: Mapping[str, Any] = entry.content
    try:
        code = content.get("code", {}).get("diff")
        return parse_digest(content["tensors"]), parse_digest(content["state"]), code and parse_digest(code)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry does not say what its tensors and its state are: {error!r}") from error

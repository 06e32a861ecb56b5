"""What model versions name, read and checked but for the bytes of their tensors: entries, tables, states, and so on.

Keeps a name and a size per object, not a record per tensor: tables are read again by those who need the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.restoring.report import shorten
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import MAX_TABLE_BYTES, TensorRecord, decode_table
from datasvc.models.versions.entry_refs import MAX_CODE_BYTES, MAX_SHARDING_BYTES, objects_of_entry
from datasvc.models.versions.signing import check_signed
from datasvc.models.versions.signing_keys import PublicKey
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest

Role = Literal["entry", "tensor table", "state", "sharding", "code", "tensors"]
Kind = Literal["missing", "changed", "unreadable", "contradictory", "not trusted"]

_MAX_BYTES: Final[Mapping[Role, int]] = {
    "tensor table": MAX_TABLE_BYTES,
    "state": MAX_STATE_BYTES,
    "sharding": MAX_SHARDING_BYTES,
    "code": MAX_CODE_BYTES,
}

BAD: Final = (CorruptDataError, NotFoundError)
# What a disk of this machine raises: it is asked directly, so its answer is about the data, not about the way to it.
BAD_DISK: Final = (*BAD, UnavailableError, ConfigError)


@dataclass(frozen=True)
class ModelProblem:
    """One object or entry that is not what it should be.

    Attributes:
        kind: "unreadable" is what a disk of this machine does not give; "contradictory" is as it was written, but
            says what cannot be; "not trusted" lacks a signature.
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
        documents: tables, states, shardings and code that were read well, with their sizes.
        tensor_bytes: of all tensors in memory, of each table once.
        bad: what damage raises here, see `BAD_DISK`.
    """

    def __init__(self, repository: Repository, trusted: Sequence[PublicKey] = ()) -> None:
        self._repository = repository
        self._trusted = trusted
        self.objects: dict[Digest, int] = {}
        self.documents: dict[Digest, int] = {}
        self.tensor_bytes = 0
        self.bad: tuple[type[DatasvcError], ...] = BAD_DISK if repository.storage.is_local else BAD
        self._tables: dict[Digest, list[Resolved]] = {}
        self._problems: dict[tuple[Role, Kind, Digest | str], tuple[str, dict[str, tuple[str, ...]]]] = {}

    @property
    def problems(self) -> list[ModelProblem]:
        """What was found, each object once with all versions that it hits."""
        return [
            ModelProblem(kind, role, parse_digest(which) if role != "entry" else None, detail, hit)
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
            named = objects_of_entry(entry.content, version)
        except (*BAD, UnavailableError) as error:
            if type(error) not in self.bad:
                raise
            self._note("entry", kind_of(error), str(version), version, str(error))
            return
        if self._trusted:
            try:
                check_signed(self._repository, version, entry, self._trusted)
            except CorruptDataError as error:
                self._note("entry", "not trusted", str(version), version, str(error))
        if named.code is not None:
            self._read("code", named.code, version)
        state, records = self._read("state", named.state, version), self._read_table(named.tensors, version)
        sharding = None if named.sharding is None else self._read("sharding", named.sharding, version)
        if state is None or records is None:
            return
        try:
            skeleton = decode_state(state, str(version))
            unflatten(skeleton, cast("Any", dict.fromkeys(record.name for record in records)))
        except CorruptDataError as error:
            self._note("state", "contradictory", named.state, version, f"{version}: {error}")
            return
        if named.sharding is not None and sharding is not None:
            self._check_sharding(named.sharding, sharding, records, skeleton, version)

    def tables(self) -> Iterator[tuple[Sequence[str], Sequence[TensorRecord]]]:
        """Yield the records of every table that could be read, each with the versions that have it."""
        for table, versions in self._tables.items():
            # It was read before; but its versions may have been removed since, or its disk fails now.
            content = self._read("tensor table", table, versions[0])
            if content is not None:
                yield list(map(str, versions)), self._decode(table, content)
                continue
            for version in versions[1:]:
                self._read("tensor table", table, version)

    def _check_sharding(
        self, digest: Digest, raw: bytes, records: Sequence[TensorRecord], skeleton: Any, version: Resolved
    ) -> None:
        # Loads all of torch.distributed, which few repositories need.
        from datasvc.models.dcp.metadata import decode_sharding

        try:
            decode_sharding(raw, {record.name: record for record in records}, skeleton, str(version))
        except CorruptDataError as error:
            self._note("sharding", "contradictory", digest, version, str(error))

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
            links = (link for record in records for chunk in record.chunks for link in chunk.chain)
            self.objects.update((link.object, link.object_bytes) for link in links)
            self.tensor_bytes += sum(record.chunk_bytes(chunk) for record in records for chunk in record.chunks)
        self._tables.setdefault(table, []).append(version)
        return records

    def _decode(self, table: Digest, content: bytes) -> Sequence[TensorRecord]:
        return decode_table(content, self._repository.objects.location(table))

    def _read(self, role: Role, digest: Digest, version: Resolved) -> bytes | None:
        try:
            content = self._repository.objects.read(digest, _MAX_BYTES[role])
        except self.bad as error:
            self._note(role, kind_of(error), digest, version, str(error))
            return None
        self.documents[digest] = len(content)
        return content

    def _note(self, role: Role, kind: Kind, which: str, version: Resolved, detail: str) -> None:
        self._problems.setdefault((role, kind, which), (detail, {}))[1][str(version)] = ()


def kind_of(error: DatasvcError) -> Kind:
    """Return what an error says of an object."""
    if isinstance(error, NotFoundError):
        return "missing"
    return "changed" if isinstance(error, CorruptDataError) else "unreadable"

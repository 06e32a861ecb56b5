"""First step of `verify`: read and check entries, tensor tables, states, shardings and code of model versions.

The bytes of the tensors are not read here. Memory is proportional to the number of objects: a digest and a size are
kept per object, and no records of tensors. Where these records are needed, `Survey.tables` reads the tables again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.restoring.report import shorten
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import MAX_TABLE_BYTES, TensorRecord, decode_table
from datasvc.models.versions.artefacts import Artefact, read_artefacts
from datasvc.models.versions.entry_fields import (
    MAX_CODE_BYTES,
    MAX_SHARDING_BYTES,
    find_wrong_fields,
    objects_of_entry,
)
from datasvc.models.versions.signing import PublicKey, check_signed
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest

Role = Literal["entry", "tensor table", "state", "sharding", "code", "tensors", "artefact"]
Kind = Literal["missing", "changed", "unreadable", "contradictory", "not trusted"]

_MAX_BYTES: Final[Mapping[Role, int]] = {
    "tensor table": MAX_TABLE_BYTES,
    "state": MAX_STATE_BYTES,
    "sharding": MAX_SHARDING_BYTES,
    "code": MAX_CODE_BYTES,
}

BAD: Final = (CorruptDataError, NotFoundError)
# On a local disk, an I/O or permission error means that the stored data are bad. On a remote store, it may come from
# the network or the credentials, so it ends the check.
BAD_DISK: Final = (*BAD, UnavailableError, ConfigError)


@dataclass(frozen=True)
class ModelProblem:
    """One damaged, missing or untrusted object or entry.

    Attributes:
        kind: "changed": its bytes do not match the digest. "contradictory": they match, but its content is
            impossible. "unreadable": a local disk fails to read it. "not trusted": it has no valid signature.
        role: what the object holds; "entry" for an entry.
        digest: digest of the object; None for an entry.
        detail: message with what was expected and what was found.
        hit: by version, names of the tensors that cannot be restored, or of the artefacts with the object; () means
            all tensors, or parts of the state that are not tensors.
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
    """Scan versions one by one and collect their objects and problems.

    Args:
        repository: repository of the versions.
        trusted: public keys. If there are any, each version must be signed by one of them.

    Attributes:
        objects: objects that hold tensors, with their sizes in bytes according to the tensor tables.
        documents: tables, states, shardings and code that could be read, with their sizes in bytes.
        files: files of artefacts, with their sizes in bytes.
        artefacts: by file, the names of its artefacts by version.
        tensor_bytes: size of all tensors in memory; a table shared by several versions counts once.
        bad: exception types that mean damage in this repository, see `BAD_DISK`.
    """

    def __init__(self, repository: Repository, trusted: Sequence[PublicKey] = ()) -> None:
        self._repository = repository
        self._trusted = trusted
        self.objects: dict[Digest, int] = {}
        self.documents: dict[Digest, int] = {}
        self.files: dict[Digest, int] = {}
        self.artefacts: dict[Digest, dict[str, tuple[str, ...]]] = {}
        self.tensor_bytes = 0
        self.bad: tuple[type[DatasvcError], ...] = BAD_DISK if repository.storage.is_local else BAD
        self._tables: dict[Digest, list[Resolved]] = {}
        self._attached: dict[str, Mapping[int, Mapping[str, Artefact]]] = {}  # by model, see `read_artefacts`
        # By object or entry: message, and by version the tensors that cannot be restored.
        self._problems: dict[tuple[Role, Kind, Digest | str], tuple[str, dict[str, tuple[str, ...]]]] = {}

    @property
    def problems(self) -> list[ModelProblem]:
        """All problems; an object that affects several versions is listed once."""
        return [
            ModelProblem(kind, role, parse_digest(subject) if role != "entry" else None, detail, hit)
            for (role, kind, subject), (detail, hit) in self._problems.items()
        ]

    def scan(self, version: Resolved) -> None:
        """Read and check a version, except for the bytes of its tensors.

        Raises:
            ConfigError: an object has a format that this version of datasvc does not support.
            UnavailableError: a remote store does not answer.
        """
        try:
            entry = self._repository.entry(version)
            refs = objects_of_entry(entry.content, version)
        except (*BAD, UnavailableError) as error:
            # Not `except self.bad`: on a local disk, `bad` includes ConfigError, which here means a later format.
            if type(error) not in self.bad:
                raise
            self._note("entry", kind_of(error), str(version), version, str(error))
            return
        if wrong := find_wrong_fields(entry.content):
            detail = f"the entry of {version} is not valid: {'; '.join(wrong.values())}"
            self._note("entry", "contradictory", str(version), version, detail)
        if self._trusted:
            try:
                check_signed(self._repository, version, entry, self._trusted)
            except CorruptDataError as error:
                self._note("entry", "not trusted", str(version), version, str(error))
        self._scan_artefacts(version)
        if refs.code is not None:
            self._read("code", refs.code, version)
        state, records = self._read("state", refs.state, version), self._read_table(refs.tensors, version)
        sharding = None if refs.sharding is None else self._read("sharding", refs.sharding, version)
        # The following checks need the state and the table. If one cannot be read, the problem is noted already.
        if state is None or records is None:
            return
        try:
            skeleton = decode_state(state, str(version))
            # Use None for each tensor, because this only finds names in the state that are not in the table.
            unflatten(skeleton, cast("Any", dict.fromkeys(record.name for record in records)))
        except CorruptDataError as error:
            self._note("state", "contradictory", refs.state, version, f"{version}: {error}")
            return
        if refs.sharding is not None and sharding is not None:
            self._check_sharding(refs.sharding, sharding, records, skeleton, version)

    def tables(self) -> Iterator[tuple[Sequence[str], Sequence[TensorRecord]]]:
        """Yield the records of each readable tensor table, with the versions that use it."""
        for table, versions in self._tables.items():
            # This second read can fail: since the scan, the versions may have been removed, or the disk may fail.
            content = self._read("tensor table", table, versions[0])
            if content is not None:
                yield list(map(str, versions)), self._decode(table, content)
                continue
            # Read it for the other versions too, because `_read` notes the problem for each of them.
            for version in versions[1:]:
                self._read("tensor table", table, version)

    def _scan_artefacts(self, version: Resolved) -> None:
        if version.name not in self._attached:
            try:
                self._attached[version.name] = read_artefacts(self._repository, version.name)
            except self.bad as error:
                self._attached[version.name] = {}
                self._note("entry", kind_of(error), f"artefacts of {version.name}", version, str(error))
        for artefact in self._attached[version.name].get(version.version, {}).values():
            for info in artefact.files.values():
                self.files[info.digest] = info.size_bytes
                names = self.artefacts.setdefault(info.digest, {})
                names[str(version)] = tuple(dict.fromkeys((*names.get(str(version), ()), artefact.name)))

    def _check_sharding(
        self, digest: Digest, raw: bytes, records: Sequence[TensorRecord], skeleton: Any, version: Resolved
    ) -> None:
        # Import this here, because it loads torch.distributed, which few repositories need.
        from datasvc.models.dcp.metadata import decode_sharding

        try:
            decode_sharding(raw, {record.name: record for record in records}, skeleton, str(version))
        except CorruptDataError as error:
            self._note("sharding", "contradictory", digest, version, str(error))

    def _read_table(self, table: Digest, version: Resolved) -> Sequence[TensorRecord] | None:
        """Return the records of a tensor table, and count its objects; None if it is bad, which is noted."""
        content = self._read("tensor table", table, version)
        if content is None:
            return None
        try:
            records = self._decode(table, content)
        except CorruptDataError as error:
            self._note("tensor table", "contradictory", table, version, str(error))
            return None
        # Equal versions share a table: count its objects once.
        if table not in self._tables:
            links = (link for record in records for chunk in record.chunks for link in chunk.chain)
            self.objects.update((link.object, link.object_bytes) for link in links)
            self.tensor_bytes += sum(record.chunk_bytes(chunk) for record in records for chunk in record.chunks)
        self._tables.setdefault(table, []).append(version)
        return records

    def _decode(self, table: Digest, content: bytes) -> Sequence[TensorRecord]:
        return decode_table(content, self._repository.objects.location(table))

    def _read(self, role: Role, digest: Digest, version: Resolved) -> bytes | None:
        """Return the bytes of an object of a version; None if it is bad, which is noted."""
        try:
            content = self._repository.objects.read(digest, _MAX_BYTES[role])
        except self.bad as error:
            self._note(role, kind_of(error), digest, version, str(error))
            return None
        self.documents[digest] = len(content)
        return content

    def _note(self, role: Role, kind: Kind, subject: str, version: Resolved, detail: str) -> None:
        # One problem per object: add each further version that uses the object to this problem.
        self._problems.setdefault((role, kind, subject), (detail, {}))[1][str(version)] = ()


def kind_of(error: DatasvcError) -> Kind:
    """Return the kind of problem for the error of a read."""
    if isinstance(error, NotFoundError):
        return "missing"
    return "changed" if isinstance(error, CorruptDataError) else "unreadable"

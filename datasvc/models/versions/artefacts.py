"""Artefacts of model versions: files that were made from a version after its save, such as an ONNX graph.

An entry of the log `models/NAME/artefacts` attaches an artefact to a version, or detaches it. It names the files by
digest, so they are objects like all others. A signature of a version covers the version's own entry, which is older:
it does not cover artefacts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from datasvc.durable import is_plain_name
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository import Digest, Entry, ObjectInfo, Repository, Resolved
from datasvc.repository.logs.log import Log
from datasvc.repository.logs.references import check_name
from datasvc.repository.objects.objects import digest_of, parse_digest
from datasvc.repository.objects.presence import check_present

_FOLDER: Final = "artefacts"


@dataclass(frozen=True)
class Artefact:
    """Files that are attached to a model version under one name.

    Attributes:
        version: the version.
        name: name of the artefact, unique in its version.
        format: format of the files, such as "onnx".
        files: digest and size of each file, by its path in the artefact. A single file has the name of the artefact.
        details: facts about the files, such as `{"opset": 18}`.
        message: text of the user.
        created: time of the attachment, ISO 8601 in UTC.
    """

    version: Resolved
    name: str
    format: str
    files: Mapping[str, ObjectInfo]
    details: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    created: str = ""

    @property
    def digest(self) -> Digest:
        """Digest of the file; of several files, the digest of their names and digests."""
        if list(self.files) == [self.name]:
            return self.files[self.name].digest
        return digest_of(json.dumps({path: info.digest for path, info in sorted(self.files.items())}).encode())

    @property
    def size_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(info.size_bytes for info in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the artefact as JSON values."""
        return {
            "name": self.name,
            "format": self.format,
            "digest": self.digest,
            "bytes": self.size_bytes,
            "details": dict(self.details),
            "message": self.message,
            "created": self.created,
            "files": {path: {"digest": info.digest, "bytes": info.size_bytes} for path, info in self.files.items()},
        }


def artefacts(repository: Repository, ref: str | Resolved) -> list[Artefact]:
    """Return the artefacts of a version, sorted by name.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`. The version may be removed.
        CorruptDataError: an entry of the log cannot be read.
    """
    version = repository.resolve("models", ref, removed=True)
    found = read_artefacts(repository, version.name).get(version.version, {})
    return [found[name] for name in sorted(found)]


def read_artefacts(repository: Repository, name: str) -> dict[int, dict[str, Artefact]]:
    """Return the artefacts of a model by number of the version and by name. For errors see `artefacts`."""
    attached: dict[int, dict[str, Artefact]] = {}
    for entry in artefact_log(repository, name).entries():
        number, artefact = parse_artefact(name, entry)
        of_version = attached.setdefault(number, {})
        if artefact is None:
            of_version.pop(entry.content["name"], None)
        else:
            of_version[artefact.name] = artefact
    return attached


def artefact_log(repository: Repository, name: str) -> Log:
    """Return the log of the artefacts of a model. Raises ConfigError: the name is not valid."""
    return Log(repository.storage, f"models/{check_name(name, 'model')}/{_FOLDER}")


def parse_artefact(name: str, entry: Entry) -> tuple[int, Artefact | None]:
    """Return the version of an entry of the model `name`, and its artefact: None if the entry detaches it.

    Raises CorruptDataError: a field is missing or has a wrong type.
    """
    content = entry.content
    try:
        number, artefact_name, files = content["version"], content["name"], content["files"]
        _check_subject(number, artefact_name)
        if files is None:
            return number, None
        return number, Artefact(
            Resolved("models", name, number),
            artefact_name,
            str(content["file_format"]),
            {
                check_path(path): ObjectInfo(parse_digest(file["digest"]), int(file["bytes"]))
                for path, file in files.items()
            },
            dict(content.get("details") or {}),
            str(content.get("message") or ""),
            str(content.get("created")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, CorruptDataError) as error:
        message = f"entry {entry.number} of the artefacts of {name} is not valid: {error}"
        raise CorruptDataError(message) from error


def _check_subject(number: object, name: Any) -> None:
    if type(number) is not int or not isinstance(name, str) or not is_plain_name(name):
        raise ValueError(f"{name!r} of version {number!r} is not an artefact")


def check_path(path: str) -> str:
    """Return the path of a file of an artefact. Raises ValueError: it could lead out of the artefact's folder."""
    if not isinstance(path, str) or not all(map(is_plain_name, path.split("/"))):
        raise ValueError(f"{str(path)[:80]!r} is not a valid path of a file; names must not begin with a dot")
    return path


def record_artefact(repository: Repository, artefact: Artefact) -> Artefact:
    """Commit an artefact whose files are stored; return it, or the equal one that is attached already.

    Raises:
        ConflictError: the version has another artefact of this name.
        NotFoundError: a file is not in the repository any more.
        ConfigError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    version = artefact.version
    facts = artefact.to_dict()
    fields = {key: facts[key] for key in ("name", "details", "message", "files")}
    # `format` is that of the entry.
    content = {"version": version.version, "file_format": artefact.format, **fields}

    def build(_head: int) -> Mapping[str, Any]:
        # Read the log for each attempt: another process may have attached an artefact of this name.
        existing = read_artefacts(repository, version.name).get(version.version, {}).get(artefact.name)
        if existing is None:
            return content
        if (existing.files, existing.format) == (artefact.files, artefact.format):
            raise _AttachedAlready(existing)
        raise ConflictError(
            f"{version} has another artefact {artefact.name!r}, with digest {existing.digest}; choose another name, "
            f"or detach it first: datasvc models detach {version} {artefact.name}"
        )

    check_present(repository.objects, {info.digest for info in artefact.files.values()}, f"{artefact.name!r}")
    try:
        entry = artefact_log(repository, version.name).append(build)
    except _AttachedAlready as attached:
        return attached.artefact
    _, recorded = parse_artefact(version.name, entry)
    assert recorded is not None
    return recorded


def detach(repository: Repository, ref: str | Resolved, name: str, *, message: str = "") -> Artefact:
    """Detach an artefact from a version, and return it. `gc` deletes its files if nothing else names them.

    Raises:
        ConfigError, NotFoundError: the reference does not resolve, or the version has no artefact of this name.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    version = repository.resolve("models", ref, removed=True)
    artefact = find_artefact(artefacts(repository, version), name, version)
    content = {"version": version.version, "name": name, "files": None, "message": message}
    artefact_log(repository, version.name).append(lambda _head: content)
    return artefact


def find_artefact(attached: Iterable[Artefact], name: str, version: Resolved) -> Artefact:
    """Return the artefact of this name. Raises NotFoundError: there is none; the message lists the others."""
    by_name = {artefact.name: artefact for artefact in attached}
    if name not in by_name:
        raise NotFoundError(f"{version} has no artefact {name!r}; it has: {', '.join(by_name) or 'none'}")
    return by_name[name]


def check_artefact_name(name: str) -> str:
    """Return the name of an artefact. Raises ConfigError: it is not a valid name of a file."""
    if not is_plain_name(name):
        raise ConfigError(
            f"{name!r} is not a valid name of an artefact; expected the name of a file without a dot first"
        )
    return name


class _AttachedAlready(Exception):  # noqa: N818 - not an error: an equal artefact is attached
    """Ends `Log.append` without a new entry."""

    def __init__(self, artefact: Artefact) -> None:
        self.artefact = artefact

"""A repository: its objects, and the logs of its data sets, models and tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.journal import Journal
from datasvc.repository.log import Entry, Log
from datasvc.repository.objects import Objects
from datasvc.repository.references import check_name, check_tag, is_name, parse_reference
from datasvc.repository.storage import Storage, redact_url

REPOSITORY_FORMAT = 1
MARKER = "datasvc.json"
_MARKER_BYTES = json.dumps({"format": REPOSITORY_FORMAT}).encode() + b"\n"

Kind = Literal["datasets", "models"]
_WORDS: dict[Kind, str] = {"datasets": "data set", "models": "model"}


@dataclass(frozen=True)
class Resolved:
    """An immutable version: what a reference meant when it was resolved."""

    kind: Kind
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


class Repository:
    """Objects and logs below one URL. Open it with `Repository.open` or `Repository.create`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.objects = Objects(storage)

    @property
    def storage(self) -> Storage:
        """The tree itself, for what looks at all of it: gc."""
        return self._storage

    @property
    def url(self) -> str:
        """Where the repository lies."""
        return self._storage.url

    @classmethod
    def open(cls, url: str) -> Repository:
        """Open an existing repository.

        Raises:
            NotFoundError: there is none.
            ConfigError: it has a later format, or the URL has no driver.
            UnavailableError: the store does not answer.
        """
        storage = Storage(url)
        try:
            raw = storage.read(MARKER)
        except NotFoundError as error:
            raise NotFoundError(
                f"no repository at {redact_url(storage.url)} (it has no {MARKER}); "
                "`datasvc ingest SOURCE NAME --repo URL` makes one"
            ) from error
        _check_marker(raw, storage.location(MARKER))
        return cls(storage)

    @classmethod
    def create(cls, url: str) -> Repository:
        """Open the repository at `url`, making it first where there is none.

        Raises:
            ConfigError: the store cannot create-only put, so commits would overwrite each other; or as `open`.
            UnavailableError: the store does not answer.
        """
        storage = Storage(url)
        try:
            storage.create(MARKER, _MARKER_BYTES)
        except ConflictError:
            return cls.open(url)
        _check_create_only(storage)
        return cls(storage)

    def journal(self, work: str, fingerprint: str, attempt: str | None = None) -> Journal:
        """Return the journal of some work, which may not have begun; arguments as of `Journal`."""
        return Journal(self._storage, work, fingerprint, attempt)

    def names(self, kind: Kind) -> list[str]:
        """Return the names that have at least one version, sorted. Raises UnavailableError."""
        return [name for name in self._storage.list(kind) if is_name(name) and self.versions(kind, name).head()]

    def versions(self, kind: Kind, name: str) -> Log:
        """Return the log of versions of `name`, which may be empty. Raises ConfigError for a bad name."""
        return Log(self._storage, f"{kind}/{check_name(name, _WORDS[kind])}/versions")

    def tags(self, kind: Kind, name: str) -> dict[str, int]:
        """Return the tags of `name` and the version each stands on now. Raises UnavailableError."""
        folder = f"{kind}/{check_name(name, _WORDS[kind])}/tags"
        heads = {tag: self._tag_head(kind, name, tag) for tag in self._storage.list(folder) if is_name(tag)}
        return {tag: version for tag, version in heads.items() if version}

    def tag_history(self, kind: Kind, name: str, tag: str) -> list[Entry]:
        """Return every move of a tag, oldest first; [] for a tag that never was. Raises UnavailableError."""
        return self._tag_log(kind, name, tag).entries()

    def tag(self, kind: Kind, ref: str, tag: str) -> Resolved:
        """Let `tag` stand on the version that `ref` means now; returns that version.

        Raises:
            NotFoundError: `ref` does not resolve.
            ConfigError: `tag` cannot be one.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        check_tag(tag)
        target = self.resolve(kind, ref)
        self._tag_log(kind, target.name, tag).append(lambda _head: {"version": target.version})
        return target

    def resolve(self, kind: Kind, ref: str) -> Resolved:
        """Return the immutable version that `ref` means now.

        Raises:
            ConfigError: `ref` is not a reference.
            NotFoundError: no such name, version or tag; says what there is.
            UnavailableError: the store does not answer.
        """
        wanted = parse_reference(ref, _WORDS[kind])
        numbers = self.versions(kind, wanted.name).numbers()
        if not numbers:
            raise NotFoundError(
                f"no {_WORDS[kind]} {wanted.name!r} in {redact_url(self.url)}; it has: {_listed(self.names(kind))}"
            )
        if wanted.tag is not None:
            tagged = self._tag_head(kind, wanted.name, wanted.tag)
            if not tagged:
                tags = sorted(self.tags(kind, wanted.name))
                raise NotFoundError(f"{wanted.name} has no tag {wanted.tag!r}; it has: {_listed(tags)}")
            return Resolved(kind, wanted.name, tagged)
        version = wanted.version or numbers[-1]
        if version not in numbers:
            raise NotFoundError(f"{wanted.name} has no version {version}; it has {numbers[0]} to {numbers[-1]}")
        return Resolved(kind, wanted.name, version)

    def entry(self, resolved: Resolved) -> Entry:
        """Return the log entry of a version. Raises CorruptDataError, NotFoundError, UnavailableError."""
        return self.versions(resolved.kind, resolved.name).read(resolved.version)

    def entries(self, kind: Kind, name: str) -> list[Entry]:
        """Return every version of `name`, oldest first.

        Raises:
            ConfigError: `name` carries a version or tag, or cannot be a name.
            NotFoundError: there is none of that name.
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        resolved = self.resolve(kind, name)
        if resolved.name != name:
            raise ConfigError(f"{name!r} names one version; give the name alone: {resolved.name}")
        return self.versions(kind, name).entries()

    def _tag_head(self, kind: Kind, name: str, tag: str) -> int:
        """Return the version a tag stands on, 0 when there is no such tag."""
        log = self._tag_log(kind, name, tag)
        head = log.head()
        return int(log.read(head).content["version"]) if head else 0

    def _tag_log(self, kind: Kind, name: str, tag: str) -> Log:
        return Log(self._storage, f"{kind}/{check_name(name, _WORDS[kind])}/tags/{check_tag(tag)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none yet"


def _check_marker(raw: bytes, location: str) -> None:
    try:
        found = int(json.loads(raw)["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"{location} is corrupt: expected {_MARKER_BYTES!r}, found {raw[:80]!r}") from error
    if found > REPOSITORY_FORMAT:
        raise ConfigError(
            f"the repository {location} has format {found}; this datasvc reads up to {REPOSITORY_FORMAT}: "
            "upgrade datasvc"
        )


def _check_create_only(storage: Storage) -> None:
    """Create the marker once more with other bytes: a store that lets it through cannot hold our logs."""
    probe = json.dumps({"format": REPOSITORY_FORMAT, "probe": True}).encode()
    try:
        storage.create(MARKER, probe)
    except ConflictError:
        return
    storage.put_bytes(MARKER, _MARKER_BYTES)
    raise ConfigError(
        f"{redact_url(storage.url)} ignores create-only writes, so commits could overwrite each other; use a store "
        "that honours If-None-Match"
    )

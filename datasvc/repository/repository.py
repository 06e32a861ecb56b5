"""A repository: its objects, and the logs of its data sets, models and tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.journal import Journal
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, Entry, Log
from datasvc.repository.logs.references import Reference, check_name, check_tag, is_name, parse_reference
from datasvc.repository.logs.removals import Removals
from datasvc.repository.logs.tags import Tags
from datasvc.repository.logs.version_numbers import describe_numbers
from datasvc.repository.objects.objects import Objects
from datasvc.repository.store.storage import Storage, redact_url

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
            raw = storage.read(MARKER, MAX_ENTRY_BYTES)
        except NotFoundError as error:
            raise NotFoundError(
                f"no repository at {redact_url(storage.url)} (it has no {MARKER}); "
                "`datasvc ingest SOURCE NAME --repo URL` makes one, and so do datasvc.open(URL, create=True) and "
                "`datasvc models push --create`"
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
        return Log(self._storage, f"{self._folder(kind, name)}/versions")

    def removals(self, kind: Kind, name: str) -> Removals:
        """Return which versions of `name` were removed. Raises ConfigError for a bad name."""
        return Removals(self._storage, self._folder(kind, name), self.versions(kind, name))

    def living(self, kind: Kind, name: str) -> list[int]:
        """Return the versions of `name` that are not removed, ascending. Raises as `Removals.removed`."""
        numbers = self.versions(kind, name).numbers()
        gone = self._gone(kind, name, numbers)
        return [number for number in numbers if number not in gone]

    def tags(self, kind: Kind, name: str) -> dict[str, int]:
        """Return the tags of `name` and the version each stands on now. Raises UnavailableError."""
        return self._tags(kind, name).heads()

    def tag_history(self, kind: Kind, name: str, tag: str) -> list[Entry]:
        """Return every move of a tag, oldest first; [] for a tag that never was. Raises UnavailableError."""
        return self._tags(kind, name).history(tag)

    def tag(self, kind: Kind, ref: str, tag: str, *, expect: int | None = None) -> Resolved:
        """Let `tag` stand on the version that `ref` means now; returns that version.

        Args:
            kind: of what `ref` names.
            ref: a reference.
            tag: made when new. Where it stands there already nothing is committed.
            expect: compare and set: move it only from this version; 0: only where there is no such tag.

        Raises:
            NotFoundError: `ref` does not resolve.
            ConfigError: `tag` cannot be one.
            ConflictError: the tag stands elsewhere than expected, or the version was removed at this moment.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        check_tag(tag)
        target = self.resolve(kind, ref)
        tags = self._tags(kind, target.name)
        before = tags.head(tag)
        if self._gone(kind, target.name, [target.version]) and target.version in tags.heads().values():
            # Whoever removed it has not looked at its tags again yet, and may never.
            self.removals(kind, target.name).give_back([target.version], "tagged")
        if before == target.version and expect in {None, before}:
            return target
        tags.move(tag, target.version, expect=expect)
        # Whoever removes a version looks at its tags before and after: of the two at least one sees the other.
        if self._gone(kind, target.name, [target.version]):
            where = self._move_back(target, tag, before)
            raise ConflictError(f"{target} was removed while {tag!r} was moved there; the tag is {where}")
        return target

    def _move_back(self, target: Resolved, tag: str, before: int) -> str:
        """Put a tag back to where it stood, unless that was removed; returns where it is, in words."""
        kind, name = target.kind, target.name
        tags = self._tags(kind, name)
        place = before if before and not self._gone(kind, name, [before]) else None
        tags.move(tag, place, expect=target.version)
        # As above: this one may be removed at this moment, too.
        if place is not None and self._gone(kind, name, [place]):
            tags.move(tag, None, expect=place)
            place = None
        if before and place is None:
            return f"taken away, as version {before}, where it was before, was removed too"
        return "where it was before"

    def untag(self, kind: Kind, name: str, tag: str, *, expect: int | None = None) -> None:
        """Take a tag of `name` away; where it stood stays in its history. `expect` and errors as of `tag`."""
        self._tags(kind, name).move(tag, None, expect=expect)

    def resolve(self, kind: Kind, ref: str | Resolved, *, removed: bool = False) -> Resolved:
        """Return the immutable version that `ref` means now.

        Args:
            kind: of what `ref` names.
            ref: a reference, or what one meant. The name alone means the newest version that is not removed.
            removed: a version that was removed will do as well: its entry is still there, its objects may be gone.

        Raises:
            ConfigError: `ref` is not a reference.
            NotFoundError: no such name, version or tag, or the version was removed; says what there is.
            UnavailableError: the store does not answer.
        """
        wanted = parse_reference(str(ref), _WORDS[kind])
        numbers = self._numbers(kind, wanted)
        gone = self._gone(kind, wanted.name, numbers)
        version = self._choose(kind, wanted, numbers, gone)
        resolved = Resolved(kind, wanted.name, version)
        # A tag holds a version, whatever became of the one that removed it before it had looked at the tags again.
        if version in gone and not removed and version not in self.tags(kind, wanted.name).values():
            raise NotFoundError(self._say_removed(resolved, set(numbers) - gone))
        if version not in numbers:
            raise NotFoundError(
                f"{wanted.name} has no version {version}; it has {describe_numbers(set(numbers) - gone)}"
            )
        return resolved

    def entry(self, resolved: Resolved) -> Entry:
        """Return the log entry of a version. Raises CorruptDataError, NotFoundError, UnavailableError."""
        return self.versions(resolved.kind, resolved.name).read(resolved.version)

    def entries(self, kind: Kind, name: str, *, last: int | None = None) -> list[Entry]:
        """Return the versions of `name`, oldest first, removed ones too.

        Args:
            kind: of what.
            name: without version or tag.
            last: only so many, the newest, at least 1; None: all.

        Raises:
            ConfigError: `name` carries a version or tag, or cannot be a name.
            NotFoundError: there is none of that name.
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        wanted = parse_reference(name, _WORDS[kind])
        numbers = self._numbers(kind, wanted)
        if wanted.name != name:
            raise ConfigError(f"{name!r} names one version; give the name alone: {wanted.name}")
        return self.versions(kind, name).entries(numbers if last is None else numbers[-last:])

    def _numbers(self, kind: Kind, wanted: Reference) -> list[int]:
        numbers = self.versions(kind, wanted.name).numbers()
        if not numbers:
            raise NotFoundError(
                f"no {_WORDS[kind]} {wanted.name!r} in {redact_url(self.url)}; it has: {_listed(self.names(kind))}"
            )
        return numbers

    def _gone(self, kind: Kind, name: str, numbers: list[int]) -> frozenset[int]:
        # Versions of data sets are never removed, models name them as what they were made from: no need to ask.
        return self.removals(kind, name).removed(numbers) if kind == "models" else frozenset()

    def _choose(self, kind: Kind, wanted: Reference, numbers: list[int], gone: frozenset[int]) -> int:
        if wanted.tag is not None:
            return self._tags(kind, wanted.name).place(wanted.tag, wanted.moves_back)
        if wanted.version is not None:
            return wanted.version
        living = [number for number in numbers if number not in gone]
        # With none left the newest of the removed: what is said of it then is true of all.
        return living[-1] if living else numbers[-1]

    def _say_removed(self, resolved: Resolved, living: set[int]) -> str:
        entry = self.removals(resolved.kind, resolved.name).find(resolved.version)
        when = f" on {entry.content['created']}" if entry else ""
        why = f" ({entry.content['message']})" if entry and entry.content.get("message") else ""
        return f"{resolved} was removed{when}{why}; {resolved.name} still has {describe_numbers(living)}"

    def _tags(self, kind: Kind, name: str) -> Tags:
        return Tags(self._storage, self._folder(kind, name))

    def _folder(self, kind: Kind, name: str) -> str:
        return f"{kind}/{check_name(name, _WORDS[kind])}"


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

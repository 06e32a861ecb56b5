"""Versions in the logs of another repository: which of them it has, and what their entries say there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.provenance.segments import history_of
from datasvc.models.registry.ancestry import HISTORY
from datasvc.models.registry.registry import parse_version
from datasvc.models.transfer.reachable import named_objects
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Kind, ObjectInfo, Repository, Resolved, parse_reference
from datasvc.repository.store.storage import redact_url
from datasvc.shards.versions.version_entry import VAL_FRACTION, read_val_fraction

# What a log writes itself.
_OWN: Final = frozenset({"format", "commit", "created", "checksum"})


class TargetLogs:
    """The logs of a repository that versions move to, read once and followed from then on.

    Args:
        source: where versions come from.
        target: where they go.
        names: those that are called otherwise at the target, by kind and name.
    """

    def __init__(self, source: Repository, target: Repository, names: Mapping[tuple[Kind, str], str]) -> None:
        self.source = source
        self._target = target
        self._names = names
        self._contents: dict[Resolved, Mapping[str, Any]] = {}
        self._known: dict[tuple[Kind, str], _TargetVersions] = {}
        self._entries = EntryReader(source)
        self._commits: dict[str, frozenset[str]] = {}

    def content(self, version: Resolved) -> Mapping[str, Any]:
        """Return what the entry of a version says at the source. Raises as `Repository.entry`."""
        if version not in self._contents:
            self._contents[version] = self.source.entry(version).content
        return self._contents[version]

    def find(self, version: Resolved) -> Resolved | None:
        """Return the same version at the target, None where it is not there, or was removed.

        Raises:
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        log = self._log(version)
        number = log.find(identity(self.content(version)))
        return None if number is None else Resolved(version.kind, log.name, number)

    def check_related(self, version: Resolved) -> None:
        """Raise ConfigError where a data-set version would be appended to the log of an unrelated data set.

        Related are logs that have a version in common, by the commit that made it, or of which one is empty.

        Raises:
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        if version.kind != "datasets":
            return
        log = self._log(version)
        log.read_new()
        if not log.contents:
            return
        if version.name not in self._commits:
            entries = self.source.versions("datasets", version.name).entries()
            self._commits[version.name] = frozenset(identity(entry.content) for entry in entries)
        if self._commits[version.name].isdisjoint(log.identities):
            raise ConfigError(
                f"cannot move {version} to {redact_url(self._target.url)}: it has another data set {log.name!r}, of "
                f"{len(log.contents)} versions, none of them from {redact_url(self.source.url)}; give this one "
                f"another name there: --rename-data {version.name}=NAME, data_names={{{version.name!r}: 'NAME'}}"
            )

    def named(self) -> set[ObjectInfo]:
        """Return what the living versions of the names that were looked for name at the target.

        Of a version that cannot be read nothing: what it names is sent again then. Raises UnavailableError.
        """
        found: set[ObjectInfo] = set()
        for log in self._known.values():
            for living in log.living():
                with suppress(NotFoundError, CorruptDataError, ConfigError):
                    found.update(named_objects(self._target, living, log.contents[living.version]))
        return found

    def commit(self, version: Resolved) -> tuple[Resolved, bool]:
        """Commit a version, all objects of which are there; returns it, and whether nobody else was faster.

        Raises:
            ConfigError: an unrelated data set has got the name meanwhile, see `check_related`.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log, content = self._log(version), self._moved(version)

        def build(head: int) -> Mapping[str, Any]:
            number = log.find(identity(content), head)
            if number is not None:
                raise _AlreadyThere(number)
            self.check_related(version)  # again, for this very head: somebody may have made the name meanwhile
            return content

        try:
            number, is_new = self._target.versions(version.kind, log.name).append(build).number, True
        except _AlreadyThere as there:
            number, is_new = there.number, False
        return Resolved(version.kind, log.name, number), is_new

    def _log(self, version: Resolved) -> _TargetVersions:
        name = self._names.get((version.kind, version.name), version.name)
        return self._known.setdefault((version.kind, name), _TargetVersions(self._target, version.kind, name))

    def _moved(self, version: Resolved) -> dict[str, Any]:
        """Return what the version's entry says at the target."""
        content = self.content(version)
        moved = {field: value for field, value in content.items() if field not in _OWN}
        moved["origin"] = content["origin"] if is_moved(content) else self._origin(version, content)
        if version.kind == "datasets" and VAL_FRACTION not in content:
            # An old entry implies it by its ancestors, which may stay behind; or which were removed.
            with suppress(NotFoundError):
                moved[VAL_FRACTION] = read_val_fraction(self.source, version)
        if isinstance(content.get("parent"), str):
            moved["parent"] = self._place(version.kind, content["parent"])
        if isinstance(content.get("merged"), list):
            moved["merged"] = [place for each in content["merged"] if (place := self._place(version.kind, str(each)))]
        leaves_parents = version.kind == "models" and _num_parents(moved) < _num_parents(content)
        if leaves_parents and HISTORY not in moved:
            # What ancestors that stay behind consumed, this version did too: see `models.saw`.
            moved[HISTORY] = history_of(self.source, str(version), entries=self._entries)
        if isinstance(moved.get(HISTORY), list):
            moved[HISTORY] = [self._moved_use(use) for use in moved[HISTORY]]
        if isinstance(content.get("data"), list):
            moved["data"] = [self._moved_use(use) for use in content["data"]]
        return moved

    def _origin(self, version: Resolved, content: Mapping[str, Any]) -> dict[str, Any]:
        merged = content.get("merged")
        parents = [content.get("parent"), *(merged if isinstance(merged, list) else ())]
        return {
            "repository": redact_url(self.source.url),
            "version": str(version),
            "commit": content["commit"],
            "created": content["created"],
            "parents": [parent for parent in parents if parent],
        }

    def _moved_use(self, use: Any) -> Any:
        if not isinstance(use, Mapping) or not isinstance(use.get("dataset"), str):
            return use
        # A mixture names the versions of all its splits, and each of them again in its state.
        named = [self._place("datasets", each) or each for each in use["dataset"].split(", ")]
        moved = {**use, "dataset": ", ".join(named)}
        state = use.get("state")
        mixture = state.get("mixture") if isinstance(state, Mapping) else None
        splits = mixture.get("splits") if isinstance(mixture, Mapping) else None
        if isinstance(state, Mapping) and isinstance(mixture, Mapping) and isinstance(splits, list):
            moved["state"] = {**state, "mixture": {**mixture, "splits": list(map(self._moved_split, splits))}}
        return moved

    def _moved_split(self, split: Any) -> Any:
        if not isinstance(split, Mapping) or not isinstance(split.get("name"), str):
            return split
        version, slash, name = split["name"].rpartition("/")
        return {**split, "name": f"{self._place('datasets', version) or version}{slash}{name}"}

    def _place(self, kind: Kind, ref: str) -> str | None:
        """Return what the target calls a version that an entry of the source names; None where it has no such one."""
        try:
            named = parse_version(ref) if kind == "models" else _version_of(ref)
            found = None if named is None else self.find(Resolved(kind, *named))
        except (NotFoundError, ConfigError):
            return None  # the source itself does not have it
        return None if found is None else str(found)


def _num_parents(content: Mapping[str, Any]) -> int:
    merged = content.get("merged")
    return (content.get("parent") is not None) + (len(merged) if isinstance(merged, list) else 0)


class _TargetVersions:
    """The versions of one name at the target, by identity."""

    def __init__(self, target: Repository, kind: Kind, name: str) -> None:
        self.name = name
        self.contents: dict[int, Mapping[str, Any]] = {}
        self._kind = kind
        self._log = target.versions(kind, name)
        self._removals = target.removals(kind, name)
        self._numbers: dict[str, list[int]] = {}

    @property
    def identities(self) -> Collection[str]:
        """Of all versions that were read."""
        return self._numbers.keys()

    def living(self) -> list[Resolved]:
        """Return the versions that were read and are not removed."""
        removed = self._removals.removed(self.contents)
        return [Resolved(self._kind, self.name, number) for number in sorted(self.contents) if number not in removed]

    def find(self, identity_wanted: str, head: int | None = None) -> int | None:
        """Return the number of a living version; `head` is the newest there is, where that is known."""
        if head is None or head not in self.contents:
            self.read_new()
        numbers = self._numbers.get(identity_wanted)
        if not numbers:
            return None
        removed = self._removals.removed(numbers)
        return next((number for number in numbers if number not in removed), None)

    def read_new(self) -> None:
        """Read the entries that are not known yet."""
        # Listed once; a log has no holes, so what came after is found by a few looks.
        new = self._log.numbers_after(max(self.contents)) if self.contents else self._log.numbers()
        for entry in self._log.entries(new):
            self.contents[entry.number] = entry.content
            self._numbers.setdefault(identity(entry.content), []).append(entry.number)


class _AlreadyThere(Exception):  # noqa: N818 - no error: somebody else has done the work
    def __init__(self, number: int) -> None:
        self.number = number


def identity(content: Mapping[str, Any]) -> str:
    """Return the id of the commit that made a version first, in whichever repository. Raises CorruptDataError."""
    commit = content["origin"]["commit"] if is_moved(content) else content.get("commit")
    if not isinstance(commit, str):
        raise CorruptDataError(f"an entry has no commit id: {content.get('commit')!r}")
    return commit


def is_moved(content: Mapping[str, Any]) -> bool:
    """Return whether a version was made in another repository."""
    origin = content.get("origin")
    return isinstance(origin, Mapping) and isinstance(origin.get("commit"), str)


def _version_of(ref: str) -> tuple[str, int] | None:
    named = parse_reference(ref)
    return None if named.version is None else (named.name, named.version)

"""Finds the versions of a transfer in the logs of the target repository, rewrites their entries, and commits them.

`copy_versions.transfer` copies the objects of a version before it commits the version here. The identity of a version
is the id of the commit that first created it, in any repository. The numbers of the version, its parents and its data
sets may differ at the target, so references in the entry are rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models.provenance.segments import history_of
from datasvc.models.registry.ancestry import HISTORY
from datasvc.models.registry.registry import parse_version
from datasvc.models.transfer.copying import reachable_objects
from datasvc.models.versions.entry_fields import check_fields
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.printable import count_text
from datasvc.repository import Kind, ObjectInfo, Repository, Resolved, parse_reference
from datasvc.repository.branching import fields_on_line
from datasvc.repository.logs.branches import BRANCH, LINES, MAIN, Branch, branch_line, branch_of
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.lines.commit import ancestors_of
from datasvc.shards.versions.dataset import find_renamed
from datasvc.shards.versions.version_entry import VAL_FRACTION, read_val_fraction

# `Log.append` writes these fields itself, so they are not copied.
_LOG_FIELDS: Final = frozenset({"format", "commit", "created", "checksum"})
# Those of a line of a data set are set for the target.
_LINE_FIELDS: Final = frozenset({BRANCH, LINES})


class TargetLogs:
    """Logs of the target repository, and the entries of the versions at the source. Each entry is read once.

    Args:
        source: repository to copy from.
        target: repository to copy to.
        names: names at the target, by kind and name at the source; other names stay the same.
        advice: advice for an unrelated data set of the target with the same name; `{name}` stands for the name.

    Attributes:
        source: repository to copy from.
        target: repository to copy to.
        carried: branches of the target that grow by the copied versions, and their heads at the source, by data set
            and line at the source.
    """

    def __init__(
        self, source: Repository, target: Repository, names: Mapping[tuple[Kind, str], str], *, advice: str
    ) -> None:
        self.source = source
        self.target = target
        self._names = names
        self._advice = advice
        self._contents: dict[Resolved, Mapping[str, Any]] = {}
        self._logs: dict[tuple[Kind, str], _TargetLog] = {}
        self._entry_reader = EntryReader(source)
        self._source_commits: dict[str, frozenset[str]] = {}
        self.carried: dict[tuple[str, str], tuple[Branch, Resolved]] = {}

    def content(self, version: Resolved) -> Mapping[str, Any]:
        """Return the content of a version's entry at the source. For errors see `Repository.entry`."""
        if version not in self._contents:
            content = self.source.entry(version).content
            if version.kind == "models":
                check_fields(content, version)
            self._contents[version] = content
        return self._contents[version]

    def find(self, version: Resolved) -> Resolved | None:
        """Return the version at the target, or None if it is missing or removed there. For errors, see `Log.read`."""
        log = self._log(version)
        number = log.find(identity(self.content(version)))
        return None if number is None else Resolved(version.kind, log.name, number)

    def check_related(self, version: Resolved) -> None:
        """Check that committing a data-set version does not append it to the log of an unrelated data set.

        Two logs are related if one is empty, or if a version with the same identity is in both.

        Raises:
            ConfigError: the target has an unrelated data set of this name.
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        if version.kind != "datasets":
            return
        log = self._log(version)
        log.read_new()
        if not log.contents:
            return
        if version.name not in self._source_commits:
            entries = self.source.readable_entries("datasets", version.name)
            self._source_commits[version.name] = frozenset(
                filter(None, (find_identity(entry.content) for entry in entries))
            )
        if self._source_commits[version.name].isdisjoint(log.numbers):
            raise ConfigError(
                f"cannot copy {version} to {redact_url(self.target.url)}, which has another data set {log.name!r} "
                f"with {count_text(len(log.contents), 'version')}, none of them from "
                f"{redact_url(self.source.url)}; give the copy another name: {self._advice.format(name=version.name)}"
            )

    def reachable(self) -> set[ObjectInfo]:
        """Return the objects that versions at the target need, of all names that this transfer has looked up so far.

        Removed versions are left out. Raises UnavailableError: the store does not respond.
        """
        objects: set[ObjectInfo] = set()
        for log in self._logs.values():
            for version in log.remaining():
                # Objects of a damaged version are left out; the transfer then sends them again.
                with suppress(NotFoundError, CorruptDataError, ConfigError):
                    objects.update(reachable_objects(self.target, version, log.contents[version.version]))
        return objects

    def commit(self, version: Resolved) -> tuple[Resolved, bool]:
        """Commit a version whose objects are all at the target.

        Returns:
            The version at the target, and whether this call created it: another process may have created it first.

        Raises:
            ConfigError: an unrelated data set has the name, see `check_related`.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log, content = self._log(version), self._rewrite(version)

        def build(head: int) -> Mapping[str, Any]:
            number = log.find(identity(content), head)
            if number is not None:
                # `append` calls this function for each attempt. Only an exception ends `append` without a new entry.
                raise _AlreadyThere(number)
            # Check again for this head: another process may have created a data set of this name meanwhile.
            self.check_related(version)
            return {**content, **self._line_fields(version, log.name, head)}

        try:
            number, is_new = self.target.versions(version.kind, log.name).append(build).number, True
        except _AlreadyThere as existing:
            number, is_new = existing.number, False
        return Resolved(version.kind, log.name, number), is_new

    def _line_fields(self, version: Resolved, name: str, head: int) -> Mapping[str, Any]:
        """Return the fields of the line at the target: of the same branch if it is carried, never of the main line.

        Raises:
            ConflictError: the branch of the target has a version that the copied one does not continue.
        """
        if version.kind != "datasets":
            return {}
        branch = branch_of(self.content(version))
        if branch is None:
            return fields_on_line(self.target, name, MAIN, head)
        carried = self.carried.get((version.name, str(self.content(version)[BRANCH])))
        if carried is not None:
            at_target, head_at_source = carried
            if version == head_at_source:
                self.check_continues(version, branch)
            # A version that the other side has merged since is an ancestor of the head, but not of what is there now.
            if version == head_at_source or self._not_continued(version, branch) is None:
                return fields_on_line(self.target, name, at_target.line, head)
        self.target.branch_logs(name).declare(branch)
        return fields_on_line(self.target, name, branch_line(branch, 0), head)

    def check_continues(self, version: Resolved, branch: str) -> None:
        """Raise ConflictError if the head of a branch at the target is not a copy of an ancestor of a version."""
        head = self._not_continued(version, branch)
        if head is None:
            return
        raise ConflictError(
            f"the branch {head.name}@{branch} at {redact_url(self.target.url)} has {head}, which {version} does not "
            f"continue: copy {head} by its number to {redact_url(self.source.url)}, merge it into the branch there, "
            "and copy the branch again"
        )

    def _not_continued(self, version: Resolved, branch: str) -> Resolved | None:
        """Return the head of a branch at the target if it is no copy of an ancestor of a version, otherwise None."""
        name = self.target_name(version)
        head = self.target.state("datasets", name).branches.get(branch)
        if head is None:
            return None
        resolved = Resolved("datasets", name, head)
        head_identity = find_identity(self.target.entry(resolved).content)
        for number in ancestors_of(self.source, version):
            if find_identity(self.content(Resolved("datasets", version.name, number))) == head_identity:
                return None
        return resolved

    def target_name(self, version: Resolved) -> str:
        """Return the name that the data set or model of a version has at the target."""
        return self._names.get((version.kind, version.name), version.name)

    def _log(self, version: Resolved) -> _TargetLog:
        """Return the log at the target that has, or will get, the version."""
        name = self.target_name(version)
        return self._logs.setdefault((version.kind, name), _TargetLog(self.target, version.kind, name))

    def _rewrite(self, version: Resolved) -> dict[str, Any]:
        """Return the content that the version's entry gets at the target."""
        content = self.content(version)
        left_out = _LOG_FIELDS | _LINE_FIELDS if version.kind == "datasets" else _LOG_FIELDS
        rewritten = {field: value for field, value in content.items() if field not in left_out}
        # A version that is copied again keeps its first origin.
        rewritten["origin"] = content["origin"] if is_copied(content) else self._origin(version, content)
        if version.kind == "datasets" and VAL_FRACTION not in content:
            # An old entry does not record the validation fraction. It follows from the ancestors, but they may not be
            # at the target: record it.
            with suppress(NotFoundError):
                rewritten[VAL_FRACTION] = read_val_fraction(self.source, version)
        if isinstance(content.get("parent"), str):
            rewritten["parent"] = self._reference_at_target(version.kind, content["parent"])
        if isinstance(content.get("merged"), list):
            names = (self._reference_at_target(version.kind, str(parent)) for parent in content["merged"])
            rewritten["merged"] = [name for name in names if name]
        if version.kind == "datasets" and isinstance(content.get("change"), Mapping):
            rewritten["change"] = self._rewrite_change(content["change"])
        loses_parents = version.kind == "models" and len(_parents(rewritten)) < len(_parents(content))
        if loses_parents and HISTORY not in rewritten:
            # The version also consumed the data of its ancestors, and some ancestors are not at the target. Record
            # the data that they consumed.
            rewritten[HISTORY] = history_of(self.source, str(version), entries=self._entry_reader)
        if isinstance(rewritten.get(HISTORY), list):
            rewritten[HISTORY] = [self._rewrite_use(use) for use in rewritten[HISTORY]]
        if isinstance(content.get("data"), list):
            rewritten["data"] = [self._rewrite_use(use) for use in content["data"]]
        return rewritten

    def _rewrite_change(self, change: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a change with the common ancestors of a merge by their names at the target, if it has them."""
        if not isinstance(change.get("bases"), list):
            return change
        bases = (self._reference_at_target("datasets", str(base)) for base in change["bases"])
        return {**change, "bases": [base for base in bases if base]}

    def _origin(self, version: Resolved, content: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "repository": redact_url(self.source.url),
            "version": str(version),
            "commit": identity(content),
            "created": content.get("created"),
            "parents": _parents(content),
        }

    def _rewrite_use(self, use: Any) -> Any:
        """Return a data use with the names at the target; an invalid one is not changed."""
        if not isinstance(use, Mapping) or not isinstance(use.get("dataset"), str):
            return use
        # A mixture lists the versions of all its splits here, separated by commas, and lists them again in its state.
        names = [self._reference_at_target("datasets", ref) or ref for ref in use["dataset"].split(", ")]
        rewritten = {**use, "dataset": ", ".join(names)}
        state = use.get("state")
        mixture = state.get("mixture") if isinstance(state, Mapping) else None
        splits = mixture.get("splits") if isinstance(mixture, Mapping) else None
        if isinstance(state, Mapping) and isinstance(mixture, Mapping) and isinstance(splits, list):
            rewritten["state"] = {**state, "mixture": {**mixture, "splits": list(map(self._rewrite_split, splits))}}
        return rewritten

    def _rewrite_split(self, split: Any) -> Any:
        if not isinstance(split, Mapping) or not isinstance(split.get("name"), str):
            return split
        version, slash, name = split["name"].rpartition("/")
        return {**split, "name": f"{self._reference_at_target('datasets', version) or version}{slash}{name}"}

    def _reference_at_target(self, kind: Kind, ref: str) -> str | None:
        """Return the name at the target of a version of the source; None if the target does not have it."""
        try:
            version = parse_version(ref) if kind == "models" else _parse_data_version(ref)
            if version is None:
                return None
            resolved = Resolved(kind, *version)
            target = self.find(resolved)
            if target is None and kind == "datasets" and (renamed := find_renamed(self.source, resolved)):
                target = self.find(renamed)
        except (NotFoundError, ConfigError, CorruptDataError):
            # The version is not in the source itself, its name is not valid there, or it cannot be read.
            return None
        return None if target is None else str(target)


def _parents(content: Mapping[str, Any]) -> list[Any]:
    """Return the references in `parent` and `merged` of an entry; a damaged `merged` is ignored."""
    merged = content.get("merged")
    return list(filter(None, [content.get("parent"), *(merged if isinstance(merged, list) else ())]))


class _TargetLog:
    """Log of one name at the target, as far as this transfer has read it.

    Attributes:
        name: name at the target.
        contents: content of each entry, by number.
        numbers: numbers of the versions, by identity; several if a version was removed and copied again.

    Removed versions are included in `contents` and `numbers`.
    """

    def __init__(self, target: Repository, kind: Kind, name: str) -> None:
        self.name = name
        self.contents: dict[int, Mapping[str, Any]] = {}
        self._kind = kind
        self._target = target
        self._log = target.versions(kind, name)
        self._removals = target.removals(kind, name)
        self.numbers: dict[str, list[int]] = {}

    def remaining(self) -> list[Resolved]:
        """Return the versions that were read and are not removed."""
        removed = self._removals.removed(self.contents)
        return [Resolved(self._kind, self.name, number) for number in sorted(self.contents) if number not in removed]

    def find(self, identity_sought: str, head: int | None = None) -> int | None:
        """Return the number of a version that has this identity and is not removed; None if there is none.

        `head` is the number of the newest version; None: unknown.
        """
        # If the newest entry was read, all entries were read, and no request is needed.
        if head is None or head not in self.contents:
            self.read_new()
        numbers = self.numbers.get(identity_sought)
        if not numbers:
            return None
        removed = self._removals.removed(numbers)
        return next((number for number in numbers if number not in removed), None)

    def read_new(self) -> None:
        """Read the entries that were not read yet."""
        # List the log only once. Its numbers have no gaps, so `numbers_after` finds new entries with a few requests.
        new = self._log.numbers_after(max(self.contents)) if self.contents else self._log.numbers()
        # Skip entries that cannot be read: at worst, a version that is already here is copied again.
        for entry in self._target.readable_entries(self._kind, self.name, new):
            self.contents[entry.number] = entry.content
            if version_identity := find_identity(entry.content):
                self.numbers.setdefault(version_identity, []).append(entry.number)


class _AlreadyThere(Exception):  # noqa: N818 - not an error: the target already has the version
    """Ends `Log.append` without a new entry; `number` is the number of the version that the target already has."""

    def __init__(self, number: int) -> None:
        self.number = number


def identity(content: Mapping[str, Any]) -> str:
    """Return the id of the commit that first created a version. Raises CorruptDataError: the entry has no id."""
    commit = find_identity(content)
    if commit is None:
        raise CorruptDataError(f"an entry has no valid commit id: {content.get('commit')!r}; expected a text")
    return commit


def find_identity(content: Mapping[str, Any]) -> str | None:
    """Return the id of the commit that first created a version; None if the entry has no valid id."""
    commit = content["origin"]["commit"] if is_copied(content) else content.get("commit")
    return commit if isinstance(commit, str) else None


def is_copied(content: Mapping[str, Any]) -> bool:
    """Return whether a version was copied from another repository."""
    origin = content.get("origin")
    return isinstance(origin, Mapping) and isinstance(origin.get("commit"), str)


def _parse_data_version(ref: str) -> tuple[str, int] | None:
    reference = parse_reference(ref)
    return None if reference.version is None else (reference.name, reference.version)

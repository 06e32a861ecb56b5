"""A repository: its objects, and the logs of its data sets, models and tags.

Invariant: a tagged version is not removed. A writer that moves a tag reads the log of removals after its commit. A
writer that removes versions reads the tags after its commit. So of two concurrent writers, at least one finds the
conflict, and reverts its own commit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError, UnreadableVersionWarning
from datasvc.repository.logs.branches import BRANCHES, MAIN_NAME, Branch, BranchLogs
from datasvc.repository.logs.heads import Heads, PositionReader, parents_of
from datasvc.repository.logs.journal import Journal
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, Entry, Log, describe_numbers, list_logs
from datasvc.repository.logs.references import (
    LATEST,
    MetricMode,
    Reference,
    check_name,
    check_tag,
    find_best,
    finite_metrics,
    is_name,
    parse_reference,
)
from datasvc.repository.logs.removals import Removals, describe_removal
from datasvc.repository.logs.tags import Tags, version_of
from datasvc.repository.marker import MARKER, MARKER_BYTES, check_create_only, check_marker
from datasvc.repository.objects.objects import Objects
from datasvc.repository.resolved import KIND_NAMES, Kind, NameState, Resolved, describe_damage, warn_unreadable
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import ReadOnlyStorage, Storage


class Repository:
    """Objects and logs below one URL. Created by `Repository.open` or `Repository.create`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.objects = Objects(storage)

    @property
    def url(self) -> str:
        """URL or local path of the repository."""
        return self.storage.url

    @classmethod
    def open(cls, url: str, *, read_only: bool = False) -> Repository:
        """Open an existing repository; with `read_only`, every write is refused with ConfigError.

        Raises:
            NotFoundError: there is no repository at `url`.
            ConfigError: the repository has a later format, or no driver for the URL is installed.
            UnavailableError: the store does not respond.
        """
        storage = ReadOnlyStorage(url) if read_only else Storage(url)
        try:
            raw = storage.read(MARKER, MAX_ENTRY_BYTES)
        except NotFoundError as error:
            raise NotFoundError(
                f"no repository at {redact_url(storage.url)} (it has no {MARKER}); create one with "
                "`datasvc ingest SOURCE NAME --repo URL`, datasvc.open(URL, create=True) or "
                "`datasvc models push --create`"
            ) from error
        check_marker(raw, storage.location(MARKER))
        return cls(storage)

    @classmethod
    def create(cls, url: str) -> Repository:
        """Open the repository at `url`; create it if it does not exist.

        Raises ConfigError if the store overwrites existing files, so that commits could be lost; else see `open`.
        """
        storage = Storage(url)
        try:
            # Of concurrent calls one creates the repository, and the others open it.
            storage.create(MARKER, MARKER_BYTES)
        except ConflictError:
            return cls.open(url)
        check_create_only(storage)
        return cls(storage)

    def journal(self, work: str, fingerprint: str, attempt: str | None = None) -> Journal:
        """Return the journal of some work, which may not have begun; for the arguments, see `Journal`."""
        return Journal(self.storage, work, fingerprint, attempt)

    def names(self, kind: Kind) -> list[str]:
        """Return the names with at least one version, sorted. Raises UnavailableError."""
        return [name for name in self.storage.list(kind) if is_name(name) and self.versions(kind, name).head()]

    def versions(self, kind: Kind, name: str) -> Log:
        """Return the log of versions of `name`, which may be empty. Raises ConfigError: `name` is not valid."""
        return Log(self.storage, f"{self._folder(kind, name)}/versions")

    def removals(self, kind: Kind, name: str) -> Removals:
        """Return the log of removed versions of `name`. Raises ConfigError if `name` is not a valid name."""
        return Removals(self.storage, self._folder(kind, name), self.versions(kind, name))

    def living(self, kind: Kind, name: str) -> list[int]:
        """Return the versions of `name` that are not removed, ascending; for errors, see `Removals.removed`."""
        logs = self._list_logs(kind, name)
        removed = self._removed(kind, name, logs)
        return [number for number in logs["versions"] if number not in removed]

    def tags(
        self, kind: Kind, name: str, *, strict: bool = False, moves: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, int]:
        """Return the tags of `name`, each with the version that it points at.

        A tag that cannot be read is left out with an `UnreadableVersionWarning`. With `strict`, its error
        (CorruptDataError, ConfigError) is raised: for callers that must not miss a tag. `moves` has the numbers of
        the moves of each tag, if the caller has listed them. Raises UnavailableError.
        """
        versions, errors = self._tags(kind, name).current_versions(moves)
        command = "datasvc models tag" if kind == "models" else "datasvc tag"
        _leave_out(name, errors, f"`{command} {name}@VERSION {{0}}` sets the tag {{0!r}} again", strict=strict)
        return versions

    def branches(
        self, name: str, *, strict: bool = False, moves: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Branch]:
        """Return the branches of a data set by name; see `tags`."""
        branches, errors = self.branch_logs(name).current(moves)
        _leave_out(name, errors, f"`datasvc branch {name} {{0}} --remove` ends the branch", strict=strict)
        return branches

    def branch_logs(self, name: str) -> BranchLogs:
        """Return the logs of the branches of a data set. Raise ConfigError if `name` is not a valid name."""
        return BranchLogs(self.storage, self._folder("datasets", name))

    def positions(self, name: str) -> PositionReader:
        """Return a reader of the lines of the versions of a data set. Raises ConfigError: `name` is not valid."""
        return PositionReader(self.versions("datasets", name), is_local=self.storage.is_local)

    def protected(self, kind: Kind, name: str, *, strict: bool = False) -> frozenset[int]:
        """Return the versions that tags point at, or at which branches begin: they cannot be removed. See `tags`."""
        tagged = self.tags(kind, name, strict=strict).values()
        branches = self.branches(name, strict=strict).values() if kind == "datasets" else ()
        return frozenset([*tagged, *(branch.start for branch in branches)])

    def tag_history(self, kind: Kind, name: str, tag: str) -> list[Entry]:
        """Return every move of a tag, oldest first; [] if the tag never existed. For errors, see `Log.entries`."""
        return self._tags(kind, name).history(tag)

    def tag(self, kind: Kind, ref: str, tag: str, *, expect: int | None = None) -> Resolved:
        """Point `tag` at the version that `ref` resolves to, and return that version.

        Args:
            kind: "datasets" or "models".
            ref: reference to a version.
            tag: tag to create or move. Nothing is committed if the tag points at the version already.
            expect: version that the tag must point at now, or 0 if it must not exist; None: no condition.

        Raises:
            NotFoundError: `ref` does not resolve.
            ConfigError: `tag` is not a valid tag; is "latest", or "main" of a data set, and not set yet; or a branch
                has this name.
            CorruptDataError: `expect` is given, but the newest move of the tag is damaged.
            ConflictError: the tag does not point at `expect`, or the version was removed concurrently.
            UnknownOutcomeError, UnavailableError, ConflictError: see `Log.append`.
        """
        check_tag(tag)
        reference = parse_reference(str(ref), KIND_NAMES[kind])
        logs = self._list_logs(kind, reference.name)
        removed = self._removed(kind, reference.name, logs)
        target = self._resolve(kind, reference, logs, removed)
        if target.version in removed:
            # `_resolve` accepts a removed version only if a tag points at it. Its removal is then not valid, but the
            # process that removed it has not reverted the removal yet, or was killed: revert it here.
            self.removals(kind, target.name).restore([target.version], "tagged")
        tags = self._tags(kind, target.name)
        newest: Entry | None = None
        try:
            newest = tags.newest(tag, logs.get(f"tags/{tag}", ()))
            previous = version_of(newest)
        except CorruptDataError:
            if expect is not None:
                raise
            # The new move follows the damaged one. A conflict below removes the tag: the previous version is unknown.
            previous = 0
        if not previous and (tag == LATEST or (tag == MAIN_NAME and kind == "datasets")):
            # A tag wins, see `resolve`. Tags of these names that are set already can be moved and removed.
            name = target.name
            reason = (
                f"{name}@{LATEST} means the newest version" if tag == LATEST else f"the main line is {name} alone"
            )
            raise ConfigError(f"{reason}, so {tag!r} cannot be a new tag; choose another name")
        if previous == target.version and expect in {None, previous}:
            return target
        if not previous and self._heads(kind, target.name, logs, removed).find(tag) is not None:
            raise ConfigError(f"{target.name} has a branch {tag!r}: choose another name for the tag")
        tags.move(tag, target.version, expect=expect, newest=newest)
        # Read the removals after the commit, see the invariant of this module.
        if self._is_removed(target):
            outcome = self._move_back(target, tag, previous)
            raise ConflictError(f"{target} was removed while tag {tag!r} was moved to it; the tag {outcome}")
        # In the same way, `create_branch` reads the tags after its commit.
        if kind == "datasets" and not previous and self.branch_logs(target.name).find(tag) is not None:
            outcome = self._move_back(target, tag, previous)
            raise ConflictError(f"a branch {tag!r} of {target.name} was created at the same time; the tag {outcome}")
        return target

    def _move_back(self, target: Resolved, tag: str, previous: int) -> str:
        """Move a tag back from `target` to a version, or remove it; return the end of a message about "the tag"."""
        kind, name = target.kind, target.name
        tags = self._tags(kind, name)
        version = previous if previous and not self._is_removed(Resolved(kind, name, previous)) else None
        tags.move(tag, version, expect=target.version)
        # Check again, as in `tag`: `version` may have been removed concurrently too.
        if version is not None and self._is_removed(Resolved(kind, name, version)):
            tags.move(tag, None, expect=version)
            version = None
        if previous and version is None:
            return f"was removed, because version {previous}, which it pointed at before, was removed too"
        return "points at its previous version again" if previous else "was removed again"

    def untag(self, kind: Kind, name: str, tag: str, *, expect: int | None = None) -> None:
        """Remove a tag of `name` but keep its history; for `expect` and errors, see `tag`."""
        self._tags(kind, name).move(tag, None, expect=expect)

    def resolve(self, kind: Kind, ref: str | Resolved, *, removed: bool = False) -> Resolved:
        """Return the immutable version that `ref` refers to at this time.

        Args:
            kind: "datasets" or "models".
            ref: reference, or a resolved version. A name alone refers to the newest version that is not removed, of a
                data set on its main line, and so does NAME@latest, if there is no tag of this name.
            removed: accept a removed version, whose entry still exists but whose objects may be deleted.

        Raises:
            ConfigError: `ref` is not a reference.
            NotFoundError: the name, version, tag or branch does not exist (the message lists what does), or was
            removed. ConflictError: a tag and a branch have this name. CorruptDataError: it is not known which branch
            a version is on, because its entry cannot be read. UnavailableError: the store does not respond.
        """
        reference = parse_reference(str(ref), KIND_NAMES[kind])
        logs = self._list_logs(kind, reference.name)
        removed_numbers = self._removed(kind, reference.name, logs)
        return self._resolve(kind, reference, logs, removed_numbers, accept_removed=removed)

    def state(self, kind: Kind, name: str) -> NameState:
        """Return the versions, tags and removals of `name` with one listing; `versions` is empty for no such name."""
        return self._state(kind, name, self._list_logs(kind, name))

    def known_state(self, kind: Kind, name: str) -> NameState:
        """Like `state`, but raise NotFoundError, which lists the names, for an unknown name."""
        state = self.state(kind, name)
        if not state.versions:
            raise self._missing(kind, name)
        return state

    def resolve_with_state(self, kind: Kind, ref: str, *, removed: bool = False) -> tuple[Resolved, NameState]:
        """Return the version that `ref` refers to, and the state of its name, with one listing; see `resolve`."""
        reference = parse_reference(str(ref), KIND_NAMES[kind])
        logs = self._list_logs(kind, reference.name)
        state = self._state(kind, reference.name, logs)
        if reference.tag is not None and not reference.moves_back:
            # `state` has the present version of each tag, so no further request is needed.
            tagged = state.tags.get(reference.tag)
            if tagged is not None and tagged in state.versions and reference.tag not in state.branches:
                return Resolved(kind, reference.name, tagged), state
        return self._resolve(kind, reference, logs, state.removed, accept_removed=removed), state

    def _state(self, kind: Kind, name: str, logs: Mapping[str, list[int]]) -> NameState:
        move_numbers = {
            path.removeprefix("tags/"): numbers for path, numbers in logs.items() if path.startswith("tags/")
        }
        tags, removed = self.tags(kind, name, moves=move_numbers), self._removed(kind, name, logs)
        heads = self._heads(kind, name, logs, removed)
        branches = self.branches(name, moves=heads.moves) if heads.moves else {}
        valid_removals = removed - set(tags.values()) - {branch.start for branch in branches.values()}
        # Where an entry cannot be read, all else is listed all the same. What needs a head gets the error.
        newest, on_branches = None, {}
        with suppress(CorruptDataError, ConfigError):
            newest = heads.main
        for branch in branches.values():
            with suppress(CorruptDataError, ConfigError):
                on_branches[branch.name] = heads.head_of(branch)
        return NameState(logs["versions"], tags, valid_removals, newest, on_branches)

    def newest(self, kind: Kind, name: str) -> Resolved | None:
        """Return the newest version of `name` (main line) that is not removed, or None; for errors, see `resolve`."""
        logs = self._list_logs(kind, name)
        removed = self._removed(kind, name, logs)
        number = self._heads(kind, name, logs, removed).main
        return None if number is None else Resolved(kind, name, number)

    def best(self, name: str, metric: str, *, mode: MetricMode | None = None) -> Resolved:
        """Return the version of a model with the best value of a metric; of equal values, the newest.

        Removed versions do not count, nor do values that are NaN or infinite. Versions that cannot be read are left
        out with a warning. `mode` is "max" or "min"; None: chosen by the name of the metric.

        Raises:
            ConfigError: no mode is given or known for this metric, or `name` or `mode` is not valid.
            NotFoundError: the model does not exist, or no version has a finite value of the metric.
            CorruptDataError, UnavailableError: the removals cannot be read, or the store does not respond.
        """
        reference = Reference(check_name(name, "model"), tag=f"best:{metric}", metric=metric, mode=mode)
        logs = self._list_logs("models", name)
        return self._resolve("models", reference, logs, self._removed("models", name, logs))

    def entry(self, resolved: Resolved) -> Entry:
        """Return the log entry of a version, even a removed one; for errors, see `Log.read`."""
        try:
            return self.versions(resolved.kind, resolved.name).read(resolved.version)
        except CorruptDataError as error:
            removal = self.removals(resolved.kind, resolved.name).find(resolved.version)
            if removal is not None and removal.content.get("lost"):
                message = f"the entry of {resolved} cannot be read: {error}; it {describe_removal(removal)}"
                raise CorruptDataError(message) from error
            raise CorruptDataError(describe_damage(resolved, error)) from error

    def readable_entries(self, kind: Kind, name: str, numbers: Iterable[int] | None = None) -> list[Entry]:
        """Return the entries of versions `numbers`, in this order; default: all versions, oldest first.

        An entry that cannot be read is left out with an `UnreadableVersionWarning`, so that it does not hide the
        others; there is no warning for a version that was marked as lost. Raises UnavailableError.
        """
        entries, errors = self.versions(kind, name).try_entries(numbers)
        lost = self.removals(kind, name).lost() if errors else frozenset()
        for number in sorted(errors.keys() - lost):
            version, error = Resolved(kind, name, number), errors[number]
            # Advise to give the version up only if its entry is damaged: a later format needs an upgrade instead.
            is_damaged = isinstance(error, CorruptDataError)
            warn_unreadable(version, CorruptDataError(describe_damage(version, error)) if is_damaged else error)
        return entries

    def entries(self, kind: Kind, name: str, *, last: int | None = None) -> list[Entry]:
        """Return the entries of all versions of `name`, or of the `last` ones, oldest first, including removed ones.

        Versions that cannot be read are left out with a warning, see `readable_entries`.

        Raises:
            ConfigError: `name` has a version or tag, or is not a valid name.
            NotFoundError: `name` does not exist.
            UnavailableError: the store does not respond.
        """
        reference = parse_reference(name, KIND_NAMES[kind])
        numbers = self.versions(kind, reference.name).numbers()
        if not numbers:
            raise self._missing(kind, reference.name)
        if reference.name != name:
            raise ConfigError(f"{name!r} is one version; give the name alone: {reference.name}")
        return self.readable_entries(kind, name, numbers if last is None else numbers[-last:])

    def _resolve(
        self,
        kind: Kind,
        reference: Reference,
        logs: Mapping[str, list[int]],
        removed: frozenset[int],
        *,
        accept_removed: bool = False,
    ) -> Resolved:
        name, numbers = reference.name, logs["versions"]
        if not numbers:
            raise self._missing(kind, name)
        living = [number for number in numbers if number not in removed]
        heads = self._heads(kind, name, logs, removed)
        if reference.version is not None:
            version = reference.version
        elif reference.metric is not None:
            if kind != "models":
                raise ConfigError(
                    f"{name}@{reference.tag}: data-set versions have no metrics; give a version or a tag"
                )
            entries = self.readable_entries(kind, name, living)
            version = find_best(
                {entry.number: finite_metrics(entry.content.get("metrics")) for entry in entries}, reference
            )
        elif reference.tag is not None and (on_branch := heads.find(reference.tag)) is not None:
            version = self._find_on_branch(reference, logs.get(f"tags/{reference.tag}", ()), on_branch, heads.read)
        elif reference.tag is not None and (reference.tag != LATEST or reference.moves_back):
            version = self._find_tagged(kind, reference, logs)
        else:
            moves = logs.get(f"tags/{LATEST}", ()) if reference.tag == LATEST else ()
            tagged = version_of(self._tags(kind, name).newest(LATEST, moves)) if moves else None
            version = tagged or self._newest_of(heads, living)
        resolved = Resolved(kind, name, version)
        # A removal of a protected version is not valid, even if its process ended before it reverted the removal.
        if version in removed and not accept_removed and version not in self.protected(kind, name):
            entry = self.removals(kind, name).find(version)
            raise NotFoundError(f"{resolved} {describe_removal(entry)}; {name} still has {describe_numbers(living)}")
        if version not in numbers:
            raise NotFoundError(f"{name} has no version {version}; it has {describe_numbers(living)}")
        return resolved

    def _newest_of(self, heads: Heads, living: Sequence[int]) -> int:
        """Return the version that a name alone refers to, which may be a removed one."""
        if heads.main is not None:
            return heads.main
        if not living:
            # All versions are removed: the error of the caller reports the removal of the newest.
            return heads.numbers[-1]
        name = heads.branches.name
        raise NotFoundError(
            f"{name} has no version on its main line; it has {describe_numbers(living)}, and the branches: "
            f"{', '.join(heads.branches.current(heads.moves)[0]) or 'none'}"
        )

    def _find_tagged(self, kind: Kind, reference: Reference, logs: Mapping[str, Sequence[int]]) -> int:
        tag = str(reference.tag)
        try:
            return self._tags(kind, reference.name).version_at(tag, reference.moves_back, logs.get(f"tags/{tag}", ()))
        except NotFoundError as error:
            branches = self.branches(reference.name) if kind == "datasets" else {}
            parts = [f"its branches: {', '.join(branches)}"] if branches else []
            parts += [f"the main line is {reference.name} alone"] if kind == "datasets" and tag == MAIN_NAME else []
            if not parts:
                raise
            raise NotFoundError("; ".join([str(error), *parts])) from error

    def _find_on_branch(self, reference: Reference, tag_moves: Sequence[int], head: int, read: PositionReader) -> int:
        name, branch = reference.name, str(reference.tag)
        if version_of(self._tags("datasets", name).newest(branch, tag_moves)):
            raise ConflictError(
                f"{name} has a tag and a branch {branch!r}, as an earlier release set the tag: give a number, or "
                f"remove one: `datasvc tag {name} {branch} --remove`, `datasvc branch {name} {branch} --remove`"
            )
        number = head
        for _ in range(reference.moves_back):
            try:
                read.entry(number)
            except CorruptDataError as error:
                raise CorruptDataError(describe_damage(Resolved("datasets", name, number), error)) from error
            parents = parents_of(read, number)
            if not parents:
                raise NotFoundError(
                    f"{name}@{branch}~{reference.moves_back} does not exist: {name}@{number} is the first"
                )
            number = parents[0]
        return number

    def _heads(self, kind: Kind, name: str, logs: Mapping[str, Sequence[int]], removed: frozenset[int]) -> Heads:
        own = logs if kind == "datasets" else {"versions": logs["versions"]}
        return Heads.of_logs(partial(self.branch_logs, name), partial(self.positions, name), own, removed)

    def _list_logs(self, kind: Kind, name: str) -> dict[str, list[int]]:
        """Return the entry numbers of all logs of `name`, by path such as "versions" or "tags/best"; one request."""
        folder = self._folder(kind, name)
        logs = {"versions": [], **list_logs(self.storage, folder)}
        if kind == "datasets" and self.storage.is_local and not any(path.startswith(BRANCHES) for path in logs):
            # A walk of a local folder lists names in any order, so a first branch, and a version on it, may have been
            # committed during it, and only the version found.
            logs |= {f"{BRANCHES}/{branch}": moves for branch, moves in self.branch_logs(name).list_moves().items()}
        return logs

    def _removed(self, kind: Kind, name: str, logs: Mapping[str, list[int]]) -> frozenset[int]:
        head = max(logs.get("removals", ()), default=0)
        return self.removals(kind, name).removed(logs["versions"], head=head) if head else frozenset()

    def _is_removed(self, version: Resolved) -> bool:
        return bool(self.removals(version.kind, version.name).removed([version.version]))

    def _missing(self, kind: Kind, name: str) -> NotFoundError:
        names = ", ".join(self.names(kind)) or "none yet"
        return NotFoundError(f"no {KIND_NAMES[kind]} {name!r} in {redact_url(self.url)}; it has: {names}")

    def _tags(self, kind: Kind, name: str) -> Tags:
        return Tags(self.storage, self._folder(kind, name))

    def _folder(self, kind: Kind, name: str) -> str:
        return f"{kind}/{check_name(name, KIND_NAMES[kind])}"


def _leave_out(name: str, errors: Mapping[str, CorruptDataError | ConfigError], advice: str, *, strict: bool) -> None:
    """Warn of the tags or branches that cannot be read, or with `strict` raise the first error, with the advice."""
    for label, error in errors.items():
        text = f"{error}; {advice.format(label)}"
        if strict:
            raise type(error)(text) from error
        message = f"{name}@{label} is left out: {text}"
        warnings.warn(UnreadableVersionWarning(f"{name}@{label}", message), stacklevel=3)

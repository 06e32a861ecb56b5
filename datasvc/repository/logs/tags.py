"""Tags of one data set or model. A tag is a log: each entry moves it to a version, or removes it (version null)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.log import Entry, Log, list_logs
from datasvc.repository.logs.references import check_tag, is_name
from datasvc.repository.store.storage import Storage
from datasvc.threads import map_in_threads

_READS_AT_ONCE = 16


class Tags:
    """Tags of one data set or model, below its folder such as "models/digits-cnn"."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = f"{folder}/tags"
        self._name = folder.rpartition("/")[2]

    def heads(
        self, logs: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[dict[str, int], dict[str, CorruptDataError | ConfigError]]:
        """Return the version that each tag points at, and the errors of the tags that cannot be read.

        Args:
            logs: numbers of the moves of each tag, ascending, if the caller has listed them already.

        Raises:
            UnavailableError: the store does not respond.
        """
        moves = list_logs(self._storage, self._folder) if logs is None else logs
        versions: dict[str, int] = {}
        errors: dict[str, CorruptDataError | ConfigError] = {}

        def read(tag: str) -> None:
            try:
                versions[tag] = version_of(self._log(tag).read(moves[tag][-1]))
            except (CorruptDataError, ConfigError) as error:
                errors[tag] = error

        tags = list(filter(is_name, sorted(moves)))
        if self._storage.is_local or len(tags) < 2:
            for tag in tags:
                read(tag)
        else:
            map_in_threads(read, tags, _READS_AT_ONCE)
        # Threads end in any order, but the tags are sorted.
        versions = {tag: versions[tag] for tag in tags if tag in versions}
        return {tag: version for tag, version in versions.items() if version}, errors

    def newest(self, tag: str, moves: Sequence[int]) -> Entry:
        """Return the newest move of a tag; for a tag that never existed, an entry 0 without a version.

        `moves` are the numbers of the tag's moves, ascending. Raises the errors of `Log.read`.
        """
        return self._log(tag).read(moves[-1]) if moves else Entry(0, {"version": None})

    def history(self, tag: str) -> list[Entry]:
        """Return every move of a tag, oldest first; [] for a tag that never existed. For errors, see `heads`."""
        return self._log(tag).entries()

    def version_at(self, tag: str, moves_back: int, moves: Sequence[int]) -> int:
        """Return the version that a tag pointed at before its `moves_back` newest moves; for `moves`, see `newest`.

        Raises:
            NotFoundError: the tag does not exist, has fewer moves, or had been removed at that time.
            CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
        """
        if not moves:
            raise NotFoundError(f"{self._name} has no tag {tag!r}; it has: {self._existing()}")
        if moves_back >= len(moves):
            raise NotFoundError(
                f"{self._name}@{tag}~{moves_back} does not exist; the oldest version of the tag is "
                f"{self._name}@{tag}~{len(moves) - 1}"
            )
        # Removals count as moves, so the entry may be a removal.
        entry = self._log(tag).read(moves[-1 - moves_back])
        if not version_of(entry):
            raise NotFoundError(
                f"{self._name} has no tag {tag!r}: it was removed on {entry.content['created']}; "
                f"{self._name}@{tag}~{moves_back + 1} is its version before; {self._name} has: {self._existing()}"
            )
        return version_of(entry)

    def move(self, tag: str, version: int | None, *, expect: int | None = None, newest: Entry | None = None) -> None:
        """Point a tag at a version, or remove the tag.

        Args:
            tag: name of the tag.
            version: new version; None removes the tag.
            expect: version that the tag must point at now, or 0 if it must not exist; None: no condition.
            newest: result of `newest`, to save two requests if no other writer has moved the tag since.

        Raises:
            ConflictError: the tag does not point at `expect`; nothing was changed.
            NotFoundError: the tag to remove does not exist.
            CorruptDataError: the newest move is damaged, and `expect` is given; otherwise it is replaced.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log = self._log(tag)

        def build(head: int) -> dict[str, int | None]:
            # Read the head unless it is `newest`: another writer may have moved the tag since the caller's listing.
            is_newest = newest is not None and newest.number == head
            try:
                current = version_of(newest if is_newest and newest else log.read(head)) if head else 0
            except CorruptDataError:
                if expect is not None:
                    raise
                # Without a condition on it, the damaged move can be replaced by a new one.
                return {"version": version}
            if expect is not None and current != expect:
                raise ConflictError(
                    f"{self._name}@{tag} points at {_describe(current)}, expected {_describe(expect)}; nothing was "
                    "changed: read the tag's history, then decide"
                )
            if version is None and not current:
                raise NotFoundError(f"{self._name} has no tag {tag!r}; it has: {self._existing()}")
            return {"version": version}

        log.append(build, head=None if newest is None else newest.number)

    def _log(self, tag: str) -> Log:
        return Log(self._storage, f"{self._folder}/{check_tag(tag)}")

    def _existing(self) -> str:
        versions, _ = self.heads()
        return ", ".join(sorted(versions)) or "none yet"


def version_of(move: Entry) -> int:
    """Return the version in an entry of a tag's log, or 0 if the entry removed the tag.

    Raises:
        CorruptDataError: the entry has no valid version.
    """
    try:
        return int(move.content["version"] or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"entry {move.number} of a tag's log has no valid version: {error!r}") from error


def choose_move(history: Sequence[Entry], when: datetime) -> Entry | None:
    """Return the last move made at or before `when`; None if the first move is later.

    Args:
        history: moves of a tag, oldest first.
        when: time with a time zone. The moves have the clock times of the machines that made them: a wrong clock is
            not corrected, but it does not change the order of the moves.

    Raises:
        CorruptDataError: a move has no valid time.
    """
    try:
        earlier = [move for move in history if datetime.fromisoformat(str(move.content["created"])) <= when]
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"a move of a tag has no valid time: {error!r}") from error
    return earlier[-1] if earlier else None


def _describe(version: int) -> str:
    return f"version {version}" if version else "no version"

"""Tags of one data set or model.

A tag is a log. Each entry is a *move*: it points the tag at a version, or removes the tag (version null).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.log import Entry, Log, list_logs, read_each
from datasvc.repository.logs.references import check_tag, is_name
from datasvc.repository.store.storage import Storage


class Tags:
    """The tags of one data set or model. `folder` is its folder, such as "models/digits-cnn"."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = f"{folder}/tags"
        self._name = folder.rpartition("/")[2]

    def current_versions(
        self, move_numbers: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[dict[str, int], dict[str, CorruptDataError | ConfigError]]:
        """Return the version that each tag points at, and the errors of the tags that cannot be read.

        `move_numbers` are those of the moves of each tag, ascending, if the caller has listed them. Raises
        UnavailableError.
        """
        numbers = list_logs(self._storage, self._folder) if move_numbers is None else move_numbers

        def read(tag: str) -> int:
            return version_of(self._log(tag).read(numbers[tag][-1]))

        versions, errors = read_each(self._storage, read, sorted(filter(is_name, numbers)))
        return {tag: version for tag, version in versions.items() if version}, errors  # 0: the tag was removed

    def newest(self, tag: str, move_numbers: Sequence[int]) -> Entry:
        """Return the newest move of a tag, or an entry with number 0 and version None if the tag never existed.

        `move_numbers` are the numbers of the tag's moves, ascending. Raises the errors of `Log.read`.
        """
        return self._log(tag).read(move_numbers[-1]) if move_numbers else Entry(0, {"version": None})

    def history(self, tag: str) -> list[Entry]:
        """Return every move of a tag, oldest first; [] if the tag never existed. For errors, see `Log.entries`."""
        return self._log(tag).entries()

    def version_at(self, tag: str, moves_back: int, move_numbers: Sequence[int]) -> int:
        """Return the version that a tag pointed at `moves_back` moves ago; 0 means now.

        For `move_numbers`, see `newest`.

        Raises:
            NotFoundError: the tag never existed, has too few moves, or had no version at that time.
            CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
        """
        if not move_numbers:
            raise NotFoundError(f"{self._name} has no tag {tag!r}; it has: {self._describe_tags()}")
        if moves_back >= len(move_numbers):
            raise NotFoundError(
                f"{self._name}@{tag}~{moves_back} does not exist; the oldest version of the tag is "
                f"{self._name}@{tag}~{len(move_numbers) - 1}"
            )
        # Removals count as moves, so the entry may be a removal.
        entry = self._log(tag).read(move_numbers[-1 - moves_back])
        if not version_of(entry):
            raise NotFoundError(
                f"{self._name}@{tag}~{moves_back} has no version: this move removed the tag on "
                f"{entry.content['created']}; the version before it is {self._name}@{tag}~{moves_back + 1}; "
                f"{self._name} now has the tags: {self._describe_tags()}"
            )
        return version_of(entry)

    def move(self, tag: str, version: int | None, *, expect: int | None = None, newest: Entry | None = None) -> None:
        """Point a tag at a version, or remove the tag (None).

        Args:
            tag: name of the tag.
            version: new version; None removes the tag.
            expect: version that the tag must point at now, or 0 if it must not exist; None: no condition.
            newest: the tag's newest move, perhaps out of date, from `Tags.newest`: this saves two requests.

        Raises:
            ConflictError: the tag does not point at `expect`, and nothing was changed; or see `Log.append`.
            NotFoundError: the tag to remove does not exist.
            CorruptDataError: the newest move is damaged, so it cannot be compared with `expect`.
            UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log = self._log(tag)

        def build(head: int) -> dict[str, int | None]:
            current = 0
            try:
                if newest is not None and newest.number == head:
                    current = version_of(newest)
                elif head:  # `newest` was not given, or another writer has moved the tag since
                    current = version_of(log.read(head))
            except CorruptDataError:
                if expect is not None:
                    raise
                # There is no condition on the present version, so a new move can follow the damaged one.
                return {"version": version}
            if expect is not None and current != expect:
                raise ConflictError(
                    f"{self._name}@{tag} points at {_describe(current)}, expected {_describe(expect)}; nothing was "
                    "changed: read the tag's history, then decide"
                )
            if version is None and not current:
                raise NotFoundError(f"{self._name} has no tag {tag!r}; it has: {self._describe_tags()}")
            return {"version": version}

        log.append(build, head=None if newest is None else newest.number)

    def _log(self, tag: str) -> Log:
        return Log(self._storage, f"{self._folder}/{check_tag(tag)}")

    def _describe_tags(self) -> str:
        versions, _ = self.current_versions()
        return ", ".join(sorted(versions)) or "none yet"


def version_of(move: Entry) -> int:
    """Return the version that a move points the tag at, or 0. Raise CorruptDataError: it has no valid version."""
    try:
        return int(move.content["version"] or 0)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptDataError(f"entry {move.number} of a tag's log has no valid version: {error!r}") from error


def choose_move(history: Sequence[Entry], when: datetime) -> Entry | None:
    """Return the last move that was made at or before `when`, which has a time zone; None if all were made later.

    `history` are the moves, oldest first. A move has the time of the machine that made it, even if that clock was
    wrong. Of all moves with a time up to `when`, the last one in the log is returned. Raise CorruptDataError: a time
    is not valid.
    """
    try:
        earlier = [move for move in history if datetime.fromisoformat(str(move.content["created"])) <= when]
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"a move of a tag has no valid time: {error!r}") from error
    return earlier[-1] if earlier else None


def _describe(version: int) -> str:
    return f"version {version}" if version else "no version"

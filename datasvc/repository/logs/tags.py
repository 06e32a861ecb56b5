"""The tags of one name. Each is a log of the places where it stood; null is where it was taken away."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from datasvc.errors import ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.log import Entry, Log
from datasvc.repository.logs.references import check_tag, is_name
from datasvc.repository.store.storage import Storage


class Tags:
    """The tags of one name.

    Args:
        storage: the repository's tree.
        folder: of the name, "models/digits-cnn".
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = f"{folder}/tags"
        self._name = folder.rpartition("/")[2]

    def heads(self) -> dict[str, int]:
        """Return the version that each tag stands on now. Raises CorruptDataError, UnavailableError."""
        standing = {tag: self.head(tag) for tag in self._storage.list(self._folder) if is_name(tag)}
        return {tag: version for tag, version in standing.items() if version}

    def head(self, tag: str) -> int:
        """Return the version a tag stands on, 0 when there is no such tag. Raises as `heads`, and ConfigError."""
        log = self._log(tag)
        newest = log.head()
        return version_of(log.read(newest)) if newest else 0

    def history(self, tag: str) -> list[Entry]:
        """Return every move of a tag, oldest first; [] for a tag that never was. Raises as `head`."""
        return self._log(tag).entries()

    def place(self, tag: str, moves_back: int = 0) -> int:
        """Return the version that a tag stood on so many moves ago.

        Raises:
            NotFoundError: there is no such tag, it moved less often, or had been taken away; says what there is.
            CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
        """
        log = self._log(tag)
        moves = log.numbers()
        if not moves:
            raise NotFoundError(f"{self._name} has no tag {tag!r}; it has: {self._listed()}")
        if moves_back >= len(moves):
            raise NotFoundError(
                f"{self._name}@{tag}~{moves_back} is before the tag's first place, which is ~{len(moves) - 1}"
            )
        entry = log.read(moves[-1 - moves_back])
        if not version_of(entry):
            raise NotFoundError(
                f"{self._name} has no tag {tag!r} any more: it was taken away on {entry.content['created']}; "
                f"{self._name}@{tag}~{moves_back + 1} is where it stood; {self._name} has: {self._listed()}"
            )
        return version_of(entry)

    def move(self, tag: str, version: int | None, *, expect: int | None = None) -> None:
        """Let a tag stand on a version, or take it away.

        Args:
            tag: its name.
            version: where to; None takes it away.
            expect: do it only while the tag stands there; 0: only while there is no such tag.

        Raises:
            ConflictError: it stands elsewhere than expected; nothing was changed.
            NotFoundError: there is no such tag to take away.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log = self._log(tag)

        def build(head: int) -> dict[str, int | None]:
            standing = version_of(log.read(head)) if head else 0
            if expect is not None and standing != expect:
                raise ConflictError(
                    f"{self._name}@{tag} stands on {_said(standing)}, not on {_said(expect)} as expected; nothing "
                    "was changed: look at its history, then decide"
                )
            if version is None and not standing:
                raise NotFoundError(f"{self._name} has no tag {tag!r}; it has: {self._listed()}")
            return {"version": version}

        log.append(build)

    def _log(self, tag: str) -> Log:
        return Log(self._storage, f"{self._folder}/{check_tag(tag)}")

    def _listed(self) -> str:
        return ", ".join(sorted(self.heads())) or "none yet"


def version_of(move: Entry) -> int:
    """Return the version that a move of a tag led to, 0 where the tag was taken away. Raises CorruptDataError."""
    try:
        return int(move.content["version"] or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"move {move.number} of a tag does not say where to: {error!r}") from error


def choose_move(history: Sequence[Entry], when: datetime) -> Entry | None:
    """Return the last move made at `when` or before, None where the first came later.

    Args:
        history: moves of a tag, in their order.
        when: with a time zone. The moves' times are those of the clocks of the machines that made them: what a wrong
            clock wrote is not corrected, but the order of the moves is never taken from it.

    Raises:
        CorruptDataError: a move does not say when it was made.
    """
    try:
        made = [move for move in history if datetime.fromisoformat(str(move.content["created"])) <= when]
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"a move of a tag does not say when it was made: {error!r}") from error
    return made[-1] if made else None


def _said(version: int) -> str:
    return f"version {version}" if version else "no version"

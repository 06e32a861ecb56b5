"""Append-only logs of numbered JSON entries. Creating the next entry is the one commit point of the system.

An entry is created only if its number is free, so of racing writers one wins and the others rebase. Every entry
carries a random commit id, so a writer that lost the store's answer can tell its own entry from another's; and a
checksum, so a changed byte is an error.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.version_numbers import describe_numbers
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.storage import Storage

ENTRY_FORMAT = 1
MAX_ENTRY_BYTES = 16 << 20
"""Of an entry, which never grows with the data: as JSON in memory it takes some twenty times as much."""

_ENTRY_NAME = re.compile(r"(\d{8,})\.json")
_APPEND_ATTEMPTS = 32
_READS_AT_ONCE = 16


@dataclass(frozen=True)
class Entry:
    """One committed entry: its number (1, 2, ...) and its content, the log's own fields included."""

    number: int
    content: Mapping[str, Any]


def encode_entry(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry: indented JSON with sorted keys and a checksum over the rest.

    Raises:
        ConfigError: the content is not JSON (a NaN, an object of another type).
    """
    try:
        checksum = _checksum(content)
        text = json.dumps({**content, "checksum": checksum}, indent=2, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this cannot be stored as JSON: {error}") from error
    return f"{text}\n".encode()


def decode_entry(raw: bytes, location: str) -> dict[str, Any]:
    """Return the content of an entry, checksum verified and removed.

    Raises:
        CorruptDataError: not JSON, or changed since it was written.
        ConfigError: written by a later format of datasvc.
    """
    try:
        content: dict[str, Any] = json.loads(raw)
        checksum = content.pop("checksum", None)
        later = int(content.get("format", 0)) > ENTRY_FORMAT
        intact = checksum == _checksum(content)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"{location} is corrupt: {error}; restore it from another copy") from error
    if later:
        raise ConfigError(
            f"{location} has format {content['format']}; this datasvc reads up to {ENTRY_FORMAT}: upgrade it"
        )
    if not intact:
        raise CorruptDataError(f"{location} is corrupt: its checksum does not match; restore it from another copy")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return digest_of(canonical.encode())


class Log:
    """A folder of numbered entries.

    Args:
        storage: the repository's tree.
        path: the folder of this log below it.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self.path = path

    def numbers(self) -> list[int]:
        """Return the numbers of all entries, ascending. Raises UnavailableError."""
        matches = map(_ENTRY_NAME.fullmatch, self._storage.list(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def head(self) -> int:
        """Return the number of the newest entry; 0 when there is none. Raises UnavailableError."""
        return max(self.numbers(), default=0)

    def read(self, number: int) -> Entry:
        """Return one entry.

        Raises:
            NotFoundError: there is no such entry; says which are.
            CorruptDataError, ConfigError, UnavailableError: see `decode_entry`, `Storage.read_checked`.
        """
        path = self.path_of(number)
        location = self._storage.location(path)
        try:
            content = self._storage.read_checked(
                path, lambda raw: decode_entry(raw, location), most_bytes=MAX_ENTRY_BYTES
            )
        except NotFoundError as error:
            span = describe_numbers(self.numbers())
            raise NotFoundError(f"{self.path} has no entry {number}; it has {span}") from error
        return Entry(number, content)

    def entries(self, numbers: Iterable[int] | None = None) -> list[Entry]:
        """Return entries in the order of `numbers`; default all, oldest first. Raises as `read`."""
        wanted = self.numbers() if numbers is None else list(numbers)
        if self._storage.is_local or len(wanted) < 2:
            return [self.read(number) for number in wanted]
        with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="datasvc-log") as pool:
            return list(pool.map(self.read, wanted))

    def numbers_after(self, number: int) -> range:
        """Return the numbers of the entries after `number`, which is there: by a few looks, as numbers have no holes.

        So a reader that knows most of a long log need not list all of it again. Raises UnavailableError.
        """
        newest, step = number, 1
        while self._has(newest + step):
            newest += step
            step *= 2
        while step := step // 2:
            newest += step if self._has(newest + step) else 0
        return range(number + 1, newest + 1)

    def append(self, build: Callable[[int], Mapping[str, Any]]) -> Entry:
        """Commit the next entry, rebasing on whoever was faster.

        Args:
            build: called with the number of the entry to build on (0: the first), once per attempt; returns
                the content. Everything that the content names must be stored already.

        Raises:
            ConflictError: others were faster in every one of the bounded attempts; nothing was committed.
            UnknownOutcomeError: the store failed and cannot say whether it wrote; holds the commit id.
            ConfigError, UnavailableError: see `encode_entry`, `Storage.create`; or the content is too large.
        """
        commit = secrets.token_hex(16)
        head = self.head()
        for _ in range(_APPEND_ATTEMPTS):
            own = {"format": ENTRY_FORMAT, "commit": commit, "created": _now()}
            content = {**build(head), **own}
            encoded = encode_entry(content)
            if len(encoded) > MAX_ENTRY_BYTES:
                raise ConfigError(
                    f"{self.path}: this entry would have {len(encoded)} bytes, and nobody reads more than "
                    f"{MAX_ENTRY_BYTES}; keep what is so large in a file of its own and name it"
                )
            try:
                # The commit point: before this line nothing is visible, after it everything is.
                self._storage.create(self.path_of(head + 1), encoded)
            except ConflictError:
                head = max(self.head(), head + 1)
            else:
                return Entry(head + 1, content)
        raise ConflictError(
            f"{self.path}: {_APPEND_ATTEMPTS} other commits were faster, the newest is entry {head}; try again"
        )

    def _has(self, number: int) -> bool:
        return self._storage.size(self.path_of(number)) is not None

    def path_of(self, number: int) -> str:
        """Return where the entry of that number lies below the repository's root."""
        return f"{self.path}/{number:08d}.json"


def _now() -> str:
    """For people to read; nothing is ever ordered by it, so a wrong clock does no harm."""
    return datetime.now(UTC).isoformat(timespec="seconds")

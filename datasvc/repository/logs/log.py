"""Append-only logs of numbered JSON entries. The creation of the next entry is the only commit point of the system.

An entry is created only if its number is free, so one of several concurrent writers succeeds. The others build their
entry again for the next number. Every entry has a random commit id. If the store's response is lost, a writer
recognises its own entry by this id. Every entry also has a checksum, which detects a changed byte.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.storage import Storage
from datasvc.threads import map_in_threads

ENTRY_FORMAT = 1
BRANCH_FORMAT = 2
"""Format of an entry on a branch: releases without branches would take it for one of the main line."""
MAX_ENTRY_BYTES = 16 << 20
"""Maximum size of an entry; large data belongs in objects. Parsed, an entry takes some twenty times its size."""

_ENTRY_NAME = re.compile(r"(\d{8,})\.json")  # the same form as in `Log.path_of`
_APPEND_ATTEMPTS = 32
_READS_AT_ONCE = 16  # parallel reads of entries from a remote store


_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SHOWN_SPANS: Final = 8

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Entry:
    """One committed entry: its number (1, 2, ...) and its content, including the fields that the log adds."""

    number: int
    content: Mapping[str, Any]


def list_logs(storage: Storage, folder: str) -> dict[str, list[int]]:
    """Return the entry numbers of each log below `folder`, ascending, by the path of the log relative to `folder`.

    This takes one request for all logs, instead of one for each. Raises UnavailableError if the store fails.
    """
    logs: dict[str, list[int]] = {}
    for path in storage.find(folder):
        log, _, name = path.rpartition("/")
        if match := _ENTRY_NAME.fullmatch(name):
            logs.setdefault(log, []).append(int(match[1]))
    for numbers in logs.values():
        numbers.sort()
    return logs


def read_each(
    storage: Storage, read: Callable[[_Key], _Result], keys: Sequence[_Key]
) -> tuple[dict[_Key, _Result], dict[_Key, CorruptDataError | ConfigError]]:
    """Return what `read` returns for each key, in the order of the keys, and the errors of those that it cannot read.

    Reads run in parallel, unless the store is local. Other errors of `read`, such as UnavailableError, are raised.
    """

    def attempt(key: _Key) -> _Result | CorruptDataError | ConfigError:
        try:
            return read(key)
        except (CorruptDataError, ConfigError) as error:
            return error

    is_parallel = not storage.is_local and len(keys) > 1
    results = map_in_threads(attempt, keys, _READS_AT_ONCE) if is_parallel else list(map(attempt, keys))
    read_keys: dict[_Key, _Result] = {}
    errors: dict[_Key, CorruptDataError | ConfigError] = {}
    for key, result in zip(keys, results, strict=True):
        if isinstance(result, CorruptDataError | ConfigError):
            errors[key] = result
        else:
            read_keys[key] = result
    return read_keys, errors


def encode_entry(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry: indented JSON with sorted keys, and a checksum of all other fields.

    The records of journals, signatures and pointers to chunks have the same form.

    Raises:
        ConfigError: the content has a value that JSON does not have, such as NaN.
    """
    try:
        checksum = _checksum(content)
        text = json.dumps({**content, "checksum": checksum}, indent=2, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the entry cannot be stored as JSON: {error}; use JSON values and finite numbers"
        ) from error
    return f"{text}\n".encode()


def decode_entry(raw: bytes, location: str, *, latest: int = ENTRY_FORMAT) -> dict[str, Any]:
    """Verify the checksum of an entry, and return its content without it. `latest` is the latest format that is read.

    Raises:
        CorruptDataError: the entry is not JSON, or its checksum does not match.
        ConfigError: the entry has a later format.
    """
    try:
        content: dict[str, Any] = json.loads(raw)
        checksum = content.pop("checksum", None)
        # Report a later format even if the checksum does not match: then advise an upgrade, not a restore.
        is_later_format = int(content.get("format", 0)) > latest
        is_intact = checksum == _checksum(content)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"{location} is corrupt: {error}; restore it from another copy") from error
    formats = range(1, latest + 1) if is_later_format and not is_intact else ()
    if any(checksum == _checksum({**content, "format": known}) for known in formats):
        # The checksum matches if the format number is replaced by one of ours, so only that number is damaged.
        raise CorruptDataError(f"{location} is corrupt: its format number was changed; restore it from another copy")
    if is_later_format:
        raise ConfigError(
            f"{location} has format {content['format']}; this datasvc reads up to {latest}: upgrade datasvc"
        )
    if not is_intact:
        raise CorruptDataError(f"{location} is corrupt: its checksum does not match; restore it from another copy")
    return content


def decode_log_entry(raw: bytes, location: str) -> dict[str, Any]:
    """Like `decode_entry`, for an entry of a log, which may be on a branch."""
    return decode_entry(raw, location, latest=BRANCH_FORMAT)


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return digest_of(canonical.encode())


class Log:
    """A folder of numbered entries at `path` of the repository's tree."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self.path = path

    def numbers(self) -> list[int]:
        """Return the numbers of all entries, ascending. Raises UnavailableError if the store does not respond."""
        matches = map(_ENTRY_NAME.fullmatch, self._storage.list(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def head(self) -> int:
        """Return the number of the newest entry, or 0 if the log is empty; for errors, see `numbers`."""
        return max(self.numbers(), default=0)

    def read(self, number: int) -> Entry:
        """Return one entry.

        Raises:
            NotFoundError: the entry does not exist; the message lists the existing numbers.
            CorruptDataError, ConfigError, UnavailableError: see `decode_entry`, `Storage.read_checked`.
        """
        try:
            content = self._storage.read_checked(self.path_of(number), decode_log_entry, max_bytes=MAX_ENTRY_BYTES)
        except NotFoundError as error:
            existing = describe_numbers(self.numbers())
            raise NotFoundError(f"{self.path} has no entry {number}; it has {existing}") from error
        return Entry(number, content)

    def entries(self, numbers: Iterable[int] | None = None) -> list[Entry]:
        """Return entries in the order of `numbers`; default: all, oldest first. For errors, see `read`."""
        selected = self.numbers() if numbers is None else list(numbers)
        if self._storage.is_local or len(selected) < 2:
            return [self.read(number) for number in selected]
        return map_in_threads(self.read, selected, _READS_AT_ONCE)

    def try_entries(
        self, numbers: Iterable[int] | None = None
    ) -> tuple[list[Entry], dict[int, CorruptDataError | ConfigError]]:
        """Return the entries that can be read, in the order of `numbers`, and the errors of the others by number.

        `numbers` are those of existing entries; default: all, oldest first. Raises UnavailableError.
        """
        entries, errors = read_each(self._storage, self.read, self.numbers() if numbers is None else list(numbers))
        return list(entries.values()), errors

    def numbers_after(self, number: int) -> range:
        """Return the numbers of the entries after the existing entry `number`, without listing the log.

        The number of requests is logarithmic in the number of new entries, whatever the length of the log. Raises
        UnavailableError if the store fails.
        """
        # Numbers have no gaps. Double the step while entries exist, then halve it until the newest entry is found.
        newest, step = number, 1
        while self._has(newest + step):
            newest += step
            step *= 2
        while step := step // 2:
            if self._has(newest + step):
                newest += step
        return range(number + 1, newest + 1)

    def append(self, build: Callable[[int], Mapping[str, Any]], *, head: int | None = None) -> Entry:
        """Commit the next entry. If another writer commits first, build the entry again for the next number.

        Args:
            build: function that is called once per attempt with the number of the newest entry (0: empty log), and
                returns the content. All objects that the content references must be stored already. Its `format` is
                set to 1, unless it is `BRANCH_FORMAT`.
            head: number of the newest entry; an outdated number costs an attempt. None: list the log to find it.

        Raises:
            ConflictError: other writers committed first in every attempt; nothing was committed.
            UnknownOutcomeError: the store failed, and it is unknown whether the entry was written.
            ConfigError: see `encode_entry`; or the content is too large.
            UnavailableError: see `Storage.create`.
        """
        commit = secrets.token_hex(16)
        head = self.head() if head is None else head
        for _ in range(_APPEND_ATTEMPTS):
            built = build(head)
            entry_format = BRANCH_FORMAT if built.get("format") == BRANCH_FORMAT else ENTRY_FORMAT
            content = {**built, "format": entry_format, "commit": commit, "created": _now()}
            encoded = encode_entry(content)
            if len(encoded) > MAX_ENTRY_BYTES:
                raise ConfigError(
                    f"{self.path}: this entry would have {len(encoded)} bytes, the limit is {MAX_ENTRY_BYTES}; "
                    "store the large values in a file and reference it"
                )
            try:
                # The commit point: before this line nothing is visible, after it everything is.
                self._storage.create(self.path_of(head + 1), encoded)
            except ConflictError:
                # Entry head + 1 exists, even if the store does not list it yet.
                head = max(self.head(), head + 1)
            else:
                return Entry(head + 1, content)
        raise ConflictError(
            f"{self.path}: other writers committed first in {_APPEND_ATTEMPTS} attempts, the newest is entry {head}; "
            "try again"
        )

    def _has(self, number: int) -> bool:
        return self._storage.size(self.path_of(number)) is not None

    def path_of(self, number: int) -> str:
        """Return the path of an entry below the repository's root."""
        return f"{self.path}/{number:08d}.json"


def _now() -> str:
    # Entries are ordered by number, never by this time, so a wrong clock does not change their order.
    return datetime.now(UTC).isoformat(timespec="seconds")


# A *span* is a run of consecutive numbers, given by its first and its last number.


def encode_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as text, with each span shortened, such as `1-3,7`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans_of(numbers))


def decode_numbers(text: object, *, among: Iterable[int]) -> frozenset[int]:
    """Return those numbers of `among` that are in `text`, a result of `encode_numbers`.

    The result is bounded by `among`, so that a damaged text such as `1-999999999` cannot use much memory.

    Raises:
        CorruptDataError: `text` is not in the form that `encode_numbers` returns.
    """
    spans = []
    for part in str(text).split(",") if text else []:
        match = _SPAN.fullmatch(part)
        if not match:
            raise CorruptDataError(f"{text!r} is not a list of versions; expected for example '1-3,7'")
        spans.append((int(match[1]), int(match[2] or match[1])))
    # Sort both numbers and spans, so that one pass is enough. The lowest span is the last one, for a fast `pop`.
    spans.sort(reverse=True)
    numbers = []
    for number in sorted(among):
        while spans and spans[-1][1] < number:
            spans.pop()  # it ends before `number`
        if spans and spans[-1][0] <= number:
            numbers.append(number)
    return frozenset(numbers)


def describe_numbers(numbers: Iterable[int]) -> str:
    """Return numbers for a message, such as `1 to 3, 7`; of many spans, only the first and the last ones."""
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in spans_of(numbers)]
    if len(shown) > _SHOWN_SPANS:
        half = _SHOWN_SPANS // 2
        shown = [*shown[:half], "...", *shown[-half:]]
    return ", ".join(shown) if shown else "none"


def spans_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the spans of `numbers` as (first, last), ascending."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans

"""Log of the copies of data sets outside a repository: exports, transfers to other repositories, attached files.

A purge cannot change these copies, so it lists them. An entry is appended after its copies are complete.
"""

from __future__ import annotations

import getpass
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.repository.logs.log import Log
from datasvc.repository.objects.objects import Digest, parse_digest
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import Storage

COPIES: Final = "copies"
EXPORT: Final = "export"
TRANSFER: Final = "transfer"
ATTACHED: Final = "in place"
# Equal copies that are made again and again, such as by a timer, get one entry.
_COMPARED: Final = 16


@dataclass(frozen=True)
class RecordedCopy:
    """A copy of a version of a data set.

    Attributes:
        version: the version, such as "pets@3"; if views of its splits were copied, with what they select.
        kind: "export", "transfer" to another repository (`push` or `pull`), or "in place" for the files of an attach.
        destination: URL or local folder, without credentials.
        samples: number of its samples. A transfer copies whole shards, with the samples that a version has deleted.
        tables: digest of the shard table of each copied split, by its name.
        redactions: number of the newest entry of the log of redactions when the copy began. What was purged until
            then is not in it.
        by: user and host.
        created: when the copy was complete, in UTC.
    """

    version: str
    kind: str
    destination: str
    samples: int
    tables: Mapping[str, Digest]
    redactions: int
    by: str = ""
    created: str = ""

    @property
    def is_export(self) -> bool:
        """Whether it is files of another format, and not a version of another repository."""
        return self.kind == EXPORT

    @property
    def is_in_place(self) -> bool:
        """Whether it is the files of a source that a version was attached to."""
        return self.kind == ATTACHED

    @property
    def place(self) -> tuple[str, str]:
        """The destination, and of a local folder its host: two hosts may have different folders of one path."""
        return self.destination, "" if "://" in self.destination else self.by.rpartition("@")[2]

    def to_json(self) -> dict[str, Any]:
        """Return the copy as JSON values."""
        return {**asdict(self), "tables": dict(self.tables)}


def record_copies(storage: Storage, copies: Sequence[RecordedCopy]) -> None:
    """Append the complete copies of one call, which have one destination; `by` and `created` are set here.

    Nothing is appended if one of the newest entries has the same copies. If the log cannot be written, there is a
    warning, and no error: the copies themselves are complete.
    """
    if not copies:
        return
    content = {
        "kind": copies[0].kind,
        "destination": redact_url(copies[0].destination),
        "redactions": copies[0].redactions,
        "by": user_and_host(),
        "versions": [
            {"version": each.version, "samples": each.samples, "tables": dict(each.tables)} for each in copies
        ],
    }
    log = Log(storage, COPIES)
    try:
        numbers = log.numbers()
        newest, _ = log.try_entries(numbers[-_COMPARED:])
        if all({name: entry.content.get(name) for name in content} != content for entry in newest):
            log.append(lambda _head: content, head=max(numbers, default=0))
    except DatasvcError as error:
        # Not raised: a caller would take the copy for failed, and repeat it.
        warnings.warn(
            f"the copy at {content['destination']} is complete, but not recorded in {redact_url(storage.url)}, "
            f"so a purge there will not list it: {error}",
            stacklevel=3,
        )


def read_copy_log(storage: Storage) -> list[RecordedCopy]:
    """Return all recorded copies, oldest first.

    Raises:
        CorruptDataError, ConfigError: an entry is damaged or has a later format, so it is unknown what was copied.
        UnavailableError: the store does not respond.
    """
    copies = []
    for entry in Log(storage, COPIES).entries():
        content = entry.content
        try:
            copies += [
                RecordedCopy(
                    str(each["version"]),
                    str(content["kind"]),
                    str(content["destination"]),
                    int(each["samples"]),
                    {str(split): parse_digest(table) for split, table in each["tables"].items()},
                    int(content["redactions"]),
                    str(content["by"]),
                    str(content["created"]),
                )
                for each in content["versions"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(
                f"entry {entry.number} of the log {COPIES} is not valid: {error!r}; restore it from a copy"
            ) from error
    return copies


def user_and_host() -> str:
    """Return who runs this process, such as "ann@host"."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may have no name for its user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"

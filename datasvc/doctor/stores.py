"""Checks a repository: its driver, access, clock, and for a folder also locks and space."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from datasvc.doctor.finding import Finding
from datasvc.doctor.machine import examine_clock, examine_repository_locks, examine_space
from datasvc.errors import DatasvcError, NotFoundError
from datasvc.node.client import NodeClient
from datasvc.repository import Repository
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import Storage


def examine_repository(url: str) -> Iterator[Finding]:
    """Yield findings on the repository at `url`. Writes one temporary file there and removes it."""
    shown = redact_url(url)
    try:
        storage = Repository.open(url).storage
        yield Finding("repository", "ok", f"{shown} can be read")
    except NotFoundError as error:
        yield Finding("repository", "warning", str(error))
        storage = Storage(url)
        if storage.is_local and not Path(storage.url).is_dir():
            return
    except DatasvcError as error:
        yield Finding("repository", "problem", str(error))
        return
    if not storage.is_local:
        yield Finding("repository client", "ok", f"{shown} is read by {storage.client}")
    try:
        yield from _examine_writing(storage, shown)
    except DatasvcError as error:
        yield Finding(
            "repository writes", "warning", f"{error}", "without write access, commands that only read still work"
        )
    if storage.is_local:
        yield from examine_space("repository", Path(storage.url))


def _examine_writing(storage: Storage, shown: str) -> Iterator[Finding]:
    before_s = time.time()
    theirs_s = storage.now_s()
    yield Finding("repository writes", "ok", f"{shown} can be written")
    yield examine_clock("repository clock", before_s, theirs_s, time.time())
    if storage.is_local:
        path = storage.create_temporary(b"can this file be locked?")
        try:
            local = storage.local_path(path)
            assert local is not None
            yield examine_repository_locks(local, Path(storage.url))
        finally:
            storage.remove_temporary(path)


def examine_node(url: str, client: NodeClient) -> Iterator[Finding]:
    """Yield findings on the node at `url`, whose client is `client`."""
    check = f"node {url}"
    try:
        before_s = time.time()
        theirs_s = client.clock_s()
        after_s = time.time()
        client.status()
    except DatasvcError as error:
        yield Finding(check, "problem", str(error), "see `datasvc serve --help`, and the log of that node")
        return
    yield Finding(check, "ok", "responds")
    yield examine_clock(f"{check} clock", before_s, theirs_s, after_s)

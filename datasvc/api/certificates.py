"""Reads the certificates of purges, which the log of redactions names."""

from __future__ import annotations

import json
from typing import Any

from datasvc.errors import NotFoundError
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.redactions import redaction_log


def list_certificates(repository: Repository, name: str | None = None) -> list[dict[str, Any]]:
    """Return a summary of the certificate of each purge of a data set, or of all, oldest first.

    Each has `certificate`, the digest that `read_certificate` reads, `dataset`, `samples`, the number of these,
    `complete`, and `created`. Raises CorruptDataError, ConfigError, UnavailableError: the log cannot be read.
    """
    entries = redaction_log(repository.objects).read().certificates.items()
    names = ("dataset", "samples", "complete", "created")
    found = [{"certificate": digest} | {each: entry.get(each) for each in names} for digest, entry in entries]
    return [each for each in found if name is None or each["dataset"] == name]


def read_certificate(repository: Repository, digest: str, name: str | None = None) -> dict[str, Any]:
    """Return a certificate with `certificate`, its digest.

    Args:
        repository: the repository of the purge.
        digest: digest of the certificate, or its first characters.
        name: data set that was purged; None: any.

    Raises:
        NotFoundError: no certificate of the data set, or more than one, has a digest that begins so.
        CorruptDataError, ConfigError, UnavailableError: it cannot be read.
    """
    known = [each["certificate"] for each in list_certificates(repository, name)]
    found = [each for each in known if digest and each.startswith(digest)]
    if len(found) != 1:
        of = "" if name is None else f" of {name[:200]}"
        which = "more than one certificate has" if found else f"no certificate of a purge{of} has"
        raise NotFoundError(f"{which} a digest that begins with {digest[:64]!r}; there are {len(known)}")
    return _read(repository, found[0])


def read_certificates(repository: Repository, name: str | None = None) -> list[dict[str, Any]]:
    """Return the certificates of the purges of a data set, or of all, oldest first; see `read_certificate`."""
    return [_read(repository, each["certificate"]) for each in list_certificates(repository, name)]


def _read(repository: Repository, digest: Digest) -> dict[str, Any]:
    return {**json.loads(repository.objects.read(digest)), "certificate": digest}

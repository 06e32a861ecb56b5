"""Versioned storage on any fsspec URL: immutable objects, and append-only logs of the versions that name them."""

from datasvc.repository.logs.log import Entry
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.objects.objects import Digest, ObjectInfo, Objects
from datasvc.repository.repository import Repository
from datasvc.repository.resolved import Kind, Resolved
from datasvc.repository.store.storage import Storage

__all__ = [
    "Digest",
    "Entry",
    "Kind",
    "ObjectInfo",
    "Objects",
    "Repository",
    "Resolved",
    "Storage",
    "parse_reference",
]

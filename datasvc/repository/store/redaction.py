"""Removes secrets from URLs and from the messages of other libraries: passwords, keys, and queries of signed URLs."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

_CONTAINER_SCHEMES: Final = frozenset({"abfs", "abfss", "adl", "az"})
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>\\`)\]}]+")
# Parameters of signed URLs, if a message has only the path and the query.
_SIGNED: Final = re.compile(
    r"([?&](?:x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|signature|sig|token|access_token|key|password)=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redact_url(url: str) -> str:
    """Return `url` without passwords, keys and queries, for messages and entries; `url` may be a chain with `::`."""
    return "::".join(map(_redact_part, url.split("::")))


def redact_text(text: str) -> str:
    """Return the text of an error with the secrets of all URLs in it removed."""
    return _SIGNED.sub(r"\1...", _URL.sub(lambda match: redact_url(match[0]), text))


def safe_cause(error: BaseException) -> BaseException | None:
    """Return `error` as the cause of an exception, or None if its message has a secret that a traceback shows."""
    text = f"{error} {error!r}"
    return error if redact_text(text) == text else None


def _redact_part(part: str) -> str:
    try:
        split = urlsplit(part)
    except ValueError:
        return part.partition("?")[0].rpartition("@")[2]  # not a valid URL, such as one with an odd IPv6 address
    if not split.netloc:
        return part.partition("?")[0] if split.scheme else part
    user, at, host = split.netloc.rpartition("@")
    # Azure URLs have the container where others have the user; a colon would precede a password.
    container = f"{user}{at}" if split.scheme in _CONTAINER_SCHEMES and ":" not in user else ""
    return urlunsplit((split.scheme, f"{container}{host}", split.path, "", ""))

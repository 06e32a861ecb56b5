"""Removes secrets from URLs and from the messages of other libraries: passwords, keys, and queries of signed URLs.

The modules that put URLs or such messages into errors, logs, entries and status documents use it.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

# Schemes of Azure, with URLs such as abfs://CONTAINER@ACCOUNT/PATH.
_CONTAINER_SCHEMES: Final = frozenset({"abfs", "abfss", "adl", "az"})
# A URL in a text ends before white space, a quotation mark or a closing bracket.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>\\`)\]}]+")
# Secret parameters of a query, for messages that have only the path and the query of a URL.
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
    """Return `error` as the cause of an exception, or None if its message has a secret: tracebacks show causes."""
    text = f"{error} {error!r}"  # `repr` also has arguments that `str` may leave out
    return error if redact_text(text) == text else None


def _redact_part(part: str) -> str:
    try:
        split = urlsplit(part)
    except ValueError:
        # Not a valid URL, such as one with an odd IPv6 address: keep what is between "@" and the query.
        return part.partition("?")[0].rpartition("@")[2]
    if not split.netloc:
        # Without a scheme, this is a local path, in which "?" is an ordinary character.
        return part.partition("?")[0] if split.scheme else part
    user, at, host = split.netloc.rpartition("@")
    # A URL of Azure has the container in the place of the user. With a colon, it has a user and a password after all.
    container = f"{user}{at}" if split.scheme in _CONTAINER_SCHEMES and ":" not in user else ""
    return urlunsplit((split.scheme, f"{container}{host}", split.path, "", ""))

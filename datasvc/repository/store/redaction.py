"""Removes secrets (passwords, keys, and queries of signed URLs) from URLs and from the messages of other libraries.

Call it wherever a URL or such a message goes into an error, a log, an entry or a status document.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

# Schemes of Azure, with URLs such as abfs://CONTAINER@ACCOUNT/PATH.
_CONTAINER_SCHEMES: Final = frozenset({"abfs", "abfss", "adl", "az"})
# A URL in a text ends before white space, a quotation mark or a closing bracket.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>\\`)\]}]+")
# A secret parameter of a query. Some messages have only the path and the query of a URL, which `_URL` does not match.
_SIGNED: Final = re.compile(
    r"([?&](?:x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|signature|sig|token|access_token|key|password)=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redact_url(url: str) -> str:
    """Return `url`, or each URL of a chain joined by `::`, without passwords, keys and queries."""
    return "::".join(map(_redact_part, url.split("::")))


def redact_text(text: str) -> str:
    """Return `text`, such as the message of an error, without the secrets of the URLs in it."""
    return _SIGNED.sub(r"\1...", _URL.sub(lambda match: redact_url(match[0]), text))


def safe_cause(error: BaseException) -> BaseException | None:
    """Return `error`, or None if it contains a secret. For `raise ... from`, because a traceback shows the cause."""
    text = f"{error} {error!r}"  # `repr` shows arguments that `str` may leave out
    return error if redact_text(text) == text else None


def _redact_part(part: str) -> str:
    try:
        split = urlsplit(part)
    except ValueError:
        # Not a valid URL, such as one with an odd IPv6 address: keep only what is between "@" and the query.
        return part.partition("?")[0].rpartition("@")[2]
    if not split.netloc:
        # Without a scheme, this is a local path, in which "?" is an ordinary character.
        return part.partition("?")[0] if split.scheme else part
    user, at, host = split.netloc.rpartition("@")
    # In a URL of Azure, the text before "@" is the container; with a colon in it, it is a user and a password.
    container = f"{user}{at}" if split.scheme in _CONTAINER_SCHEMES and ":" not in user else ""
    return urlunsplit((split.scheme, f"{container}{host}", split.path, "", ""))

"""Conversion of obstore's exceptions to those of Python, which `retries.map_exceptions` converts to our own.

obstore's messages have several lines, and their first line rarely says what has happened: "error sending request".
The conversion takes the reason from the other lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from datasvc.repository.store.redaction import redact_text, safe_cause

_DENIED: Final = frozenset({"PermissionDeniedError", "UnauthenticatedError"})
_EXISTS: Final = frozenset({"AlreadyExistsError", "PreconditionError"})
# How S3 answers requests for a bucket of another region. Without a body, as for HEAD, only the redirect is known.
_WRONG_REGION: Final = re.compile(
    "redirect without LOCATION|<Code>(AuthorizationHeaderMalformed|IllegalLocationConstraintException)</Code>"
)
_STATUS: Final = re.compile(r"status code: (\d{3})([ \w]*)")
# An error document of S3, Google or Azure.
_DOCUMENT: Final = re.compile(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?")
_TEXT: Final = re.compile(r'\b(?:message|error): "([^"]+)"')
_IDENTIFIER: Final = re.compile(r"\b[A-Z][A-Za-z]+\b")
# Phrases for what rustls, hyper and reqwest name by identifiers.
_PHRASES: Final = {
    "TimedOut": "no answer within the time limit",
    "IncompleteMessage": "the server closed the connection",
    "IncompleteBody": "the server closed the connection too early",
    "UnexpectedEof": "the server closed the connection",
    "Version": "the response is not HTTP",
    "UnknownIssuer": "certificate verify failed: it is from an unknown issuer; set SSL_CERT_FILE",
    "CaUsedAsEndEntity": "certificate verify failed: it is that of an issuer, not of a server",
    "NotValidForName": "certificate verify failed: it is for another host name",
    "Expired": "certificate verify failed: it has expired",
}


class UnsupportedResponseError(Exception):
    """obstore cannot read the server's response, but fsspec's client may."""


class WrongRegionError(UnsupportedResponseError):
    """The bucket of S3 is in another region than that of the request."""


class RangeBeyondEndError(OSError):
    """The requested range starts at or after the end of the file; any range of an empty file does."""


@contextmanager
def convert_errors() -> Iterator[None]:
    """Convert the exceptions of obstore.

    Raises:
        PermissionError: the store denies access.
        FileExistsError: a create-only write found a file.
        RangeBeyondEndError, UnsupportedResponseError, WrongRegionError: see there.
        OSError: any other failure. obstore itself raises FileNotFoundError for a missing file.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "obstore":
            raise
        name, reason = type(error).__name__, redact_text(reason_of(str(error)))
        # A web server without ranges; and a response that is chunked or ends with the connection.
        if name == "NotSupportedError" or "MissingContentLength" in str(error):
            raise UnsupportedResponseError(reason) from safe_cause(error)
        if "S3 error" in str(error) and _WRONG_REGION.search(str(error)):
            raise WrongRegionError(reason) from safe_cause(error)
        kind: type[OSError] = OSError
        if name in _DENIED:
            kind = PermissionError
        elif name in _EXISTS:
            kind = FileExistsError
        elif status_of(str(error)) == 416:
            kind = RangeBeyondEndError
        raise kind(reason) from safe_cause(error)


def status_of(message: str) -> int | None:
    """Return the HTTP status that an error of obstore names, or None."""
    status = _STATUS.search(message)
    return int(status[1]) if status else None


def reason_of(message: str) -> str:
    """Return the message of an error of obstore as one line that says the reason."""
    first, _, details = message.partition("\n\nDebug source:")
    if status := _STATUS.search(first):
        document = _DOCUMENT.search(first)
        said = "" if document is None else ": " + ": ".join(part for part in document.groups() if part)
        return f"the server responds {status[1]}{status[2]}{said}"
    texts: list[str] = _TEXT.findall(details)
    if texts:
        return texts[-1]
    identifiers = _IDENTIFIER.findall(details)
    if identifiers and identifiers[-1] in _PHRASES:
        return _PHRASES[identifiers[-1]]
    return first.partition("\n")[0]

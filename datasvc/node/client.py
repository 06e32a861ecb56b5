"""What asks a node how it is."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from datasvc.cache.peers.membership import parse_node
from datasvc.errors import ConfigError, UnavailableError

_TIMEOUT_S = 10.0


_MAX_ANSWER_BYTES = 64 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: the token would go with the request to whoever is named."""

    def redirect_request(self, *_request: Any) -> None:
        return None


class NodeClient:
    """One node.

    Args:
        url: its base URL.
        token: what it asks for; None where it asks for nothing.
        ca_file: certificates that vouch for it; None takes the system's.

    Raises:
        ConfigError: `url` is none, or the certificates cannot be read.
    """

    def __init__(self, url: str, *, token: str | None = None, ca_file: Path | None = None) -> None:
        self._url = parse_node(url)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot read certificates from {ca_file}: {error}") from error
        # No proxies: a node is a neighbour, and its token is for nobody else.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), _NoRedirects()
        )

    def status(self) -> dict[str, Any]:
        """Return the status document.

        Raises:
            ConfigError: it does not take our token, or is no node.
            UnavailableError: it does not answer.
        """
        request = urllib.request.Request(f"{self._url}/status", headers=self._headers)  # noqa: S310 - http(s) only
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                found = json.loads(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            if error.code == http.client.UNAUTHORIZED:
                raise ConfigError(f"{self._url} does not take our token; give its own with --token-file") from error
            raise UnavailableError(f"{self._url} answers {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._url} does not answer: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{self._url} is no node of datasvc: it answers something else") from error
        if not isinstance(found, dict) or "cache" not in found:
            raise ConfigError(f"{self._url} is no node of datasvc: it answers something else")
        return found

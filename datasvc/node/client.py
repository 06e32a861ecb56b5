"""HTTP client for the status of a node, which `datasvc top` shows."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from datasvc.cache.peers.membership import parse_node
from datasvc.cache.peers.peer_source import tls_context
from datasvc.errors import ConfigError, UnavailableError

_TIMEOUT_S = 10.0
_MAX_RESPONSE_BYTES = 64 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the request would carry the token to the host in the redirect."""

    def redirect_request(self, *_request: Any) -> None:
        return None


class NodeClient:
    """Client of one node.

    Args:
        url: base URL of the node.
        token: bearer token of the node; None if it requires none.
        ca_file: CA certificates for the node; None: those of the system.

    Raises:
        ConfigError: `url` is not a valid node URL, or the certificates cannot be read.
    """

    def __init__(self, url: str, *, token: str | None = None, ca_file: Path | None = None) -> None:
        self._url = parse_node(url)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # No proxies: a node is in the local network, and a proxy would receive the token.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls_context(ca_file)), _NoRedirects()
        )

    def status(self) -> dict[str, Any]:
        """Return the status document.

        Raises:
            ConfigError: the node rejects the token, or the server is not a node.
            UnavailableError: the node does not respond.
        """
        request = urllib.request.Request(f"{self._url}/status", headers=self._headers)  # noqa: S310 - http(s) only
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                document = json.loads(response.read(_MAX_RESPONSE_BYTES))
        except urllib.error.HTTPError as error:
            # The user must correct a wrong token; other errors may be temporary.
            if error.code == http.client.UNAUTHORIZED:
                raise ConfigError(f"{self._url} rejects the token; give its token with --token-file") from error
            raise UnavailableError(f"{self._url} responds {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._url} does not respond: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{self._url} is not a node of datasvc: its response is not JSON") from error
        if not isinstance(document, dict) or "cache" not in document:
            raise ConfigError(f"{self._url} is not a node of datasvc: its response is not a status document")
        return document

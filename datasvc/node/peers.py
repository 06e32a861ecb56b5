"""Peers as commands name them: their text form, and the token from the environment."""

from __future__ import annotations

import os

from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.node.http.auth import TOKEN_VARIABLE, load_token


def open_peers(text: str) -> Peers:
    """Return the nodes that `text` names, see `parse_membership`; the token is that of `DATASVC_TOKEN`.

    Raises:
        ConfigError, UnavailableError: as `parse_membership`; the token is none.
    """
    settings = PeerSettings(token=load_token(None, os.environ.get(TOKEN_VARIABLE)))
    return Peers(parse_membership(text), settings)

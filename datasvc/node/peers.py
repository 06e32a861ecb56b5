"""Open the peers that an option of a command or a recipe lists, with the token from the environment."""

from __future__ import annotations

import os

from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.node.http.auth import TOKEN_VARIABLE, load_token


def open_peers(text: str) -> Peers:
    """Return the peers that `text` lists (see `parse_membership`), with the token in `DATASVC_TOKEN`.

    Raises:
        ConfigError: `text` or the token is not valid.
        UnavailableError: see `parse_membership`.
    """
    settings = PeerSettings(token=load_token(None, os.environ.get(TOKEN_VARIABLE)))
    return Peers(parse_membership(text), settings)

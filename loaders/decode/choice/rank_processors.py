"""How many processors a loader may count on: those of its process, divided among the ranks of the node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from datasvc.errors import ConfigError
from datasvc.processors import count_processors

# Set by torchrun and datasvc-run, by horovodrun, by Open MPI. The first that is set counts.
_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def count_rank_processors(environ: Mapping[str, str] = os.environ) -> int:
    """Return this rank's share of the processors, at least 1; all of them where no launcher started it.

    Every rank of a node may run on the same processors: each would start a thread for all of them.

    Raises:
        ConfigError: the launcher's number of ranks on this node is none.
    """
    name = next((name for name in _LOCAL_SIZES if environ.get(name)), None)
    if name is None:
        return count_processors()
    given = environ[name]
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{name} is {given!r}; expected the number of ranks on this node: set it so, or unset it")
    return max(1, count_processors() // int(given))

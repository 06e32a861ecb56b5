"""Number of processors for one rank: those of the process, divided by the number of ranks on the node.

It is the default number of decoding threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from datasvc.errors import ConfigError
from datasvc.threads import count_processors

# Variables of torchrun and datasvc-run, of horovodrun, and of Open MPI. The first that is set is used.
_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def count_rank_processors(environ: Mapping[str, str] = os.environ) -> int:
    """Return this rank's part of the processors, at least 1; all of them without a launcher.

    The ranks of a node may share its processors; without the division, each rank would start a thread per processor.

    Raises:
        ConfigError: the launcher's variable for the number of ranks on this node is not a positive integer.
    """
    name = next((name for name in _LOCAL_SIZES if environ.get(name)), None)
    if name is None:
        return count_processors()
    value = environ[name]
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}; expected the number of ranks on this node: correct it, or unset it")
    return max(1, count_processors() // int(value))

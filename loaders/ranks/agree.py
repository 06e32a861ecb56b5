"""Distributes a decision of data rank 0 to all ranks, through the key-value store of their process group.

A store is used instead of a collective, for two reasons: ranks may use it from any thread, in parallel with other
communication; and a rank that never uses it does not block the collectives of the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_TIMEOUT: Final = timedelta(minutes=20)  # longer than data rank 0 takes to try all decoding backends


def default_store() -> Store | None:
    """Return a separate connection to the store of torch.distributed; None if there is no process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public function
    # A thread that waits locks the connection for other threads, so use a clone, which has its own connection. Stores
    # written in Python, such as those of elastic jobs, have no such lock and cannot be cloned.
    with suppress(RuntimeError):
        store = store.clone()
    default: Store = store
    return default


def agree(
    question: str, choose: Callable[[], str], *, is_first: bool, store: Store, timeout: timedelta = _TIMEOUT
) -> str:
    """Return, on every rank, the result of `choose` on data rank 0.

    Args:
        question: text that identifies the decision, equal on all ranks. The same text later has the same answer.
        choose: function that decides. It is called once, in one process of data rank 0.
        is_first: whether this is a process of data rank 0; with tensor or pipeline parallelism there are several.
        store: store of the process group.
        timeout: longest time that other processes wait for the answer.

    Raises:
        ConfigError: `choose` failed on data rank 0.
        UnavailableError: data rank 0 gave no answer in time, or the process of the store has exited.
        RuntimeError: another error of the store. In an elastic job, HorovodInternalError: a rank is lost.
    """
    from torch.distributed import DistNetworkError, DistStoreError  # needs torch, which the loaders do not need

    key = f"datasvc/decode/{question}"
    # Several processes may have data rank 0. The first one that increments the counter decides; the others wait.
    if is_first and store.add(f"{key}/asked", 1) == 1:
        try:
            answer = {"chosen": choose()}
        except Exception as error:  # report it to the other ranks too: otherwise they would wait until the timeout
            store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        store.set(key, json.dumps(answer))
        return answer["chosen"]
    try:
        store.wait([key], timeout)
        reply = json.loads(store.get(key))
    except DistNetworkError as error:
        raise UnavailableError(
            f"the store of the process group cannot be reached, so the choice of data rank 0 is unknown: {error}; "
            "its process has probably exited: read the output of the launcher and of the other ranks"
        ) from error
    except DistStoreError as error:  # the time limit
        raise UnavailableError(
            f"data rank 0 did not report within {timeout} what it has chosen; create and iterate the same loaders on "
            "every rank of a job, or choose for all ranks: decode='cpu' or another backend, and the order as "
            "order=OrderConfig(...)"
        ) from error
    if "error" in reply:
        raise ConfigError(f"data rank 0 could not choose: {reply['error']}")
    return str(reply["chosen"])

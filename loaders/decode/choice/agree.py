"""One answer for all ranks of a job, through the store of their process group.

A store of keys and values, and no collective: ranks may ask in any thread and beside any other communication, and a
rank that never asks keeps none of the others from their collectives.
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

_TIMEOUT: Final = timedelta(minutes=20)  # longer than all trials together


def default_store() -> Store | None:
    """Return a connection of its own to the store of torch.distributed; None where no process group was made."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    # Who waits in a store keeps all other threads out of that connection, so it gets one of its own. A store written
    # in Python, as those of elastic jobs, has no such lock, and cannot be cloned.
    with suppress(RuntimeError):
        store = store.clone()
    found: Store = store
    return found


def agree(
    question: str, choose: Callable[[], str], *, is_first: bool, store: Store, timeout: timedelta = _TIMEOUT
) -> str:
    """Return what `choose` gives on the first rank, on every rank that asks the same question.

    Args:
        question: the same text on all ranks. Asked again, it has the same answer.
        choose: called once, on one of those that are first.
        is_first: whether this is data rank 0; its tensor- and pipeline-parallel peers are too.
        store: of the process group.
        timeout: for the others.

    Raises:
        ConfigError: what `choose` raised, there or on the first rank.
        UnavailableError: the first rank gave no answer.
    """
    key = f"datasvc/decode/{question}"
    if is_first and store.add(f"{key}/asked", 1) == 1:
        try:
            answer = {"chosen": choose()}
        except Exception as error:
            store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        store.set(key, json.dumps(answer))
        return answer["chosen"]
    try:
        store.wait([key], timeout)
        found = json.loads(store.get(key))
    except RuntimeError as error:  # of the store: the time is over, or its process is gone
        raise UnavailableError(
            f"data rank 0 did not say within {timeout} which backend decodes; every rank of a job makes and iterates "
            "the same loaders; otherwise name the backend, with decode='cpu' or another"
        ) from error
    if "error" in found:
        raise ConfigError(f"data rank 0 could not choose a backend: {found['error']}")
    return str(found["chosen"])

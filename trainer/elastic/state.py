"""What the ranks of an elastic job have in common, and how far it is committed."""

from __future__ import annotations

import copy
import importlib
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from datasvc.trainer.job import runtime
from datasvc.trainer.optim.broadcast_state import broadcast_object
from datasvc.trainer.rendezvous.host_update import HostsUpdatedInterrupt, HostUpdateResult

BroadcastObject = Callable[..., Any]


class State:
    """Base of elastic states. Subclasses say how to save, restore and synchronize; see `TorchState`.

    Args:
        bcast_object: `broadcast_object` or a stand-in.
        get_rank: `rank` or a stand-in.
    """

    def __init__(
        self, bcast_object: BroadcastObject = broadcast_object, get_rank: Callable[[], int] = runtime.rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._serial = 0
        self.num_commits = 0
        """Of this process."""
        self.sync_s = 0.0
        """Seconds that the last synchronization took: it brings a rank that joins the state of one that lives."""

    @property
    def serial(self) -> int:
        """Grows with each commit and each synchronization; equal serials of two ranks are equal states."""
        return self._serial

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Calls these, in order, whenever the ranks have met anew: rank and size may have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have met anew."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have changed: called on every rank as soon as the launcher says so, from a thread of its own.

        The next `check_host_updates` of rank 0 makes all ranks meet anew. An override must not block: the changes
        that follow wait for it.

        Args:
            timestamp: greater than that of the change before.
            update_res: of `HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves, so that no later failure undoes what was done so far, and checks for changes of hosts.

        Every rank calls this at the same point of the training.

        Raises:
            HostsUpdatedInterrupt: see `check_host_updates`.
        """
        self.save()
        self._serial += 1
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Every rank calls this: rank 0 says whether hosts have changed, and all agree.

        Raises:
            HostsUpdatedInterrupt: they have; on all ranks.
            HorovodInternalError: a rank is lost.
        """
        mine = (self._last_updated_timestamp, *self._drain_messages())
        before, self._last_updated_timestamp, result = self._bcast_object(mine)
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(skip_sync=result == HostUpdateResult.removed)

    def synchronize(self) -> None:
        """Makes all ranks' states equal to rank 0's, and counts that; `run` calls it."""
        began_s = time.perf_counter()
        self.sync()
        self.sync_s = time.perf_counter() - began_s
        self._serial = 1 + self._bcast_object(self._serial)

    def save(self) -> None:
        """Keeps the state in memory, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes all ranks' states equal to rank 0's, and saves. Every rank calls this."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to the new rank and size, before the reset callbacks run."""

    def _drain_messages(self) -> tuple[float, int]:
        newest, result = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                newest, result = max(newest, timestamp), result | change
        return newest, result


class ObjectState(State):
    """Keeps attributes: `ObjectState(epoch=0, step=0)` has `state.epoch` and `state.step`.

    Args:
        bcast_object: see `State`.
        get_rank: see `State`.
        kwargs: attributes and their first values, anything that can be pickled.
    """

    def __init__(
        self,
        bcast_object: BroadcastObject = broadcast_object,
        get_rank: Callable[[], int] = runtime.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Keeps copies of the attributes: what is changed in place later does not change them."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Goes back to the copies."""
        self._set_attrs()

    def sync(self) -> None:
        """Takes over rank 0's attributes, as they are now, and saves them."""
        if self._saved_state:
            attributes = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            for name, value in attributes.items():
                setattr(self, name, value)
        # All at once and last: a death in the middle must leave the last commit whole.
        self.save()

    def _set_attrs(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)


# Horovod has these in its module of this name; here they are in modules that import this one.
_MODULE_OF = {
    "ElasticSampler": "elastic_sampler",
    "TorchState": "torch_state",
    "StateHandler": "handlers",
    "ModelStateHandler": "handlers",
    "OptimizerStateHandler": "handlers",
    "SamplerStateHandler": "handlers",
    "get_handler_registry": "registry",
    "set_handler_registry": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'datasvc.trainer.elastic.state' has no attribute {name!r}")
    return getattr(importlib.import_module(f"datasvc.trainer.elastic.{_MODULE_OF[name]}"), name)

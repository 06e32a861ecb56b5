"""The shared state of the ranks of an elastic job, such as model, optimizer and epoch.

`run` restores or synchronizes it before each call of the training function. `State` is the interface, `ObjectState`
is a state of plain attributes, and `handlers` has the state for models and optimizers. A round is a period in
which the ranks of the job and their numbers do not change.
"""

from __future__ import annotations

import copy
import importlib
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from datasvc.trainer.job import runtime
from datasvc.trainer.optim.broadcast_state import broadcast_object
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt, HostUpdateResult

BroadcastObject = Callable[..., Any]


class State:
    """Base class of elastic states. Subclasses define save, restore and synchronization; see `TorchState`.

    Args:
        bcast_object: `broadcast_object` or a replacement.
        get_rank: `rank` or a replacement.
    """

    def __init__(
        self, bcast_object: BroadcastObject = broadcast_object, get_rank: Callable[[], int] = runtime.rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        # The arguments of `on_hosts_updated` for each change of hosts that was not checked yet.
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        # The number of the last change that was checked. "Timestamp" is Horovod's name for such a number.
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._serial = 0
        self.num_commits = 0
        """Number of commits that this process has made."""
        self.sync_s = 0.0
        """Duration of the last synchronization, in seconds."""

    @property
    def serial(self) -> int:
        """Serial number, which grows with each commit and synchronization. Equal numbers mean equal states."""
        return self._serial

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call, in order, after each new round, when rank and size may have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new round: discard old host messages, then call `reset` and the reset callbacks."""
        # The new round includes these changes. A newer one may be lost too, so `run` then calls `repeat_notice`.
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record a change of hosts; called on every rank, from a background thread, when the launcher reports one.

        The next `check_host_updates` of rank 0 starts a new round. An override must not block, because later changes
        wait for it.

        Args:
            timestamp: number of the change; greater than that of the previous change.
            update_res: value of `HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, so that later failures do not undo the training so far; then check for changes of hosts.

        Every rank calls this at the same point of the training.

        Raises:
            HostsUpdatedInterrupt: see `check_host_updates`.
        """
        self.save()
        # Increased only after the state is saved: a rank with the greatest serial number becomes rank 0 of the next
        # round, and the other ranks copy its state.
        self._serial += 1
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check for changes of hosts. Every rank calls this; all ranks use the answer of rank 0.

        Raises:
            HostsUpdatedInterrupt: hosts have changed; raised on all ranks.
            HorovodInternalError: a rank is lost.
        """
        # All ranks must raise in the same call, so all use the values of rank 0: the number of the change that was
        # checked last, the number of the newest change, and the kinds of the changes in between. If hosts were only
        # removed, no new rank needs a copy of the state.
        local_update = (self._last_updated_timestamp, *self._drain_messages())
        previous, self._last_updated_timestamp, result = self._bcast_object(local_update)
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(skip_sync=result == HostUpdateResult.removed)

    def synchronize(self) -> None:
        """Copy the state of rank 0 to all ranks, and increase the serial number; `run` calls it."""
        began_s = time.perf_counter()
        self.sync()
        self.sync_s = time.perf_counter() - began_s
        # All states are now equal, so their serial numbers must be equal too, also on ranks that are new in the job.
        self._serial = 1 + self._bcast_object(self._serial)

    def save(self) -> None:
        """Save the state in memory, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks, and save it. Every rank calls this."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new rank and size, before the reset callbacks run. Subclasses override it if they need to."""

    def _drain_messages(self) -> tuple[float, int]:
        newest, result = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:  # otherwise it was checked before
                newest, result = max(newest, timestamp), result | change
        return newest, result


class ObjectState(State):
    """A state of plain attributes: `ObjectState(epoch=0, step=0)` has `state.epoch` and `state.step`.

    `kwargs` are the attributes with their initial values, which must be picklable.
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
        """Save deep copies of the attributes, so that later changes in place do not affect them."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Restore the attributes from the copies."""
        self._set_attrs()

    def sync(self) -> None:
        """Copy the current attributes of rank 0, and save them."""
        if self._saved_state:
            attributes = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            for name, value in attributes.items():
                setattr(self, name, value)
        # Saved only after all attributes have arrived: a failure before that must leave the last commit intact.
        self.save()

    def _set_attrs(self) -> None:
        # Deep copies again, so that changes of the attributes in place do not affect the saved ones.
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)


# Names of Horovod's module `state`, and their modules here. These are imported on use: some of them import this one.
_MODULE_OF = {
    "ElasticSampler": "sampler",
    "TorchState": "handlers",
    "StateHandler": "handlers",
    "ModelStateHandler": "handlers",
    "OptimizerStateHandler": "handlers",
    "SamplerStateHandler": "handlers",
    "get_handler_registry": "handlers",
    "set_handler_registry": "handlers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'datasvc.trainer.elastic.state' has no attribute {name!r}")
    return getattr(importlib.import_module(f"datasvc.trainer.elastic.{_MODULE_OF[name]}"), name)

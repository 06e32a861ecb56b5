"""Converts torchdata's loader states to the common loader state of datasvc.

torchdata's `StatefulDataLoader` stores the state of each worker, or the state of the sampler, after the last batch
handed over. It can load these states only with the same number of workers. The common state is a position, which does
not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from datasvc.errors import ConfigError
from datasvc.ledger.masked import masks_of, with_masks
from datasvc.order import OrderState
from datasvc.printable import count_text

_KIND: Final = "datasvc.loaders.torch"


@dataclass(frozen=True)
class DrawState:
    """State of one process that draws batches: of a worker, or of the main process.

    Attributes:
        position: position at which its next step starts; the end of the epoch if it has no further step.
        worker: index of the loader's worker; 0 in the main process.
        num_workers: number of workers of the loader; 0 in the main process.
        num_batches: number of batches that this process has drawn since the loader's start.
        global_batch: number of positions of a step.
        num_samples: samples of the epoch.
        order: `OrderState` at the loader's start, as JSON values.
        kind: constant by which a stored state of this type is recognized.
    """

    position: int
    worker: int
    num_workers: int
    num_batches: int
    global_batch: int
    num_samples: int
    order: dict[str, Any]
    kind: str = _KIND

    @classmethod
    def from_dict(cls, state: Any) -> DrawState:
        """Return the state from a dict of its attributes. Raises ConfigError: `state` is another value."""
        if not _is_draw_state(state):
            raise ConfigError(
                f"this is no state of a data set or sampler of datasvc: found {_summarize(state)}; give the "
                "state of a loader over a data set or sampler of datasvc"
            )
        try:
            return cls(**state)
        except TypeError as error:
            raise ConfigError(
                f"this state is of another release of datasvc ({error}); load it with the release that saved it"
            ) from error


def order_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common state, for any number of workers, from a state of any loader over datasvc's data sets.

    Args:
        state: state of a `StatefulDataLoader`, a `ResumableDataLoader` or any other loader of datasvc.

    Raises:
        ConfigError: `state` is none of these, or the loader's `batch_size` was not that of the order.
    """
    try:
        return _order_state(state)
    except KeyError as error:
        raise ConfigError(
            f"this state of torchdata lacks the field {error}; expected a state of torchdata 0.11: use that version"
        ) from error


def _order_state(state: Mapping[str, Any]) -> dict[str, Any]:
    # If torchdata's loader has workers, its state has a snapshot of them. Otherwise the state itself has the fields.
    if "_snapshot" in state:
        snapshot = state["_snapshot"]
        sampler_state = snapshot["_main_snapshot"]["_sampler_iter_state"]
        fetchers = [worker["fetcher_state"] for worker in snapshot["_worker_snapshots"].values()]
        draws = _find_draw_states(sampler_state, fetchers)
        num_after = state["_steps_since_snapshot"]
        return _combine(draws, snapshot["_snapshot_step"], num_after, ended=state["_iterator_finished"])
    if "_num_yielded" in state:
        draws = _find_draw_states(state["_sampler_iter_state"], [state["fetcher_state"]])
        return _combine(draws, state["_num_yielded"], 0, ended=state["_iterator_finished"])
    return dict(state)  # a state of a datasvc loader, which is the common state already


def _find_draw_states(sampler_state: Any, fetchers: Sequence[Any]) -> list[DrawState]:
    """Return the state of the `OrderBatchSampler` in the main process, or those of `IterableDataset` in workers."""
    if _is_draw_state(sampler_state):
        return [DrawState.from_dict(sampler_state)]
    # The fetcher of a map-style data set has the state None, which `from_dict` refuses: its order is not datasvc's.
    return [DrawState.from_dict(fetcher and fetcher["dataset_iter_state"]) for fetcher in fetchers]


def _combine(draws: Sequence[DrawState], num_handed: int, num_after: int, *, ended: bool) -> dict[str, Any]:
    """Return the common loader state: the position before which every step was handed over.

    Args:
        draws: states of all processes that draw batches.
        num_handed: number of batches that the loader had handed over when the states were saved.
        num_after: number of batches handed over afterwards.
        ended: whether the epoch has ended.

    Raises:
        ConfigError: the batches of the loader are not those of the order.
    """
    num_drawn = sum(draw.num_batches for draw in draws)
    if num_drawn != num_handed:
        raise ConfigError(
            f"the loader handed over {count_text(num_handed, 'batch', 'batches')}, made of {num_drawn} of the "
            "order, so its batch_size is "
            "not that of the OrderBatchSampler and the position is unknown; give the loader the same batch_size"
        )
    first = draws[0]
    start, masked = OrderState.from_dict(first.order), masks_of(first.order)
    if ended:
        return with_masks(replace(start, epoch=start.epoch + 1, position=0).to_dict(), masked)
    # The loader takes batches from its workers in turn. So when the states were saved, all steps before the earliest
    # next step were handed over. Each batch that was handed over afterwards is one more step.
    position = min(draw.position for draw in draws) + num_after * first.global_batch
    return with_masks(replace(start, position=min(position, first.num_samples)).to_dict(), masked)


def _is_draw_state(state: Any) -> bool:
    return isinstance(state, Mapping) and state.get("kind") == _KIND


def _summarize(state: Any) -> str:
    return f"the fields {sorted(state)}" if isinstance(state, Mapping) else repr(state)


# `OrderBatchSampler` passes it to `Dataset`, because the random numbers of a transform depend on the position.


class ServedIndex(int):
    """A sample number with its position in the order. It is an `int`, so any map-style data set accepts it.

    Args:
        number: number of the sample in its split.
        seed: seed of the order.
        epoch: epoch, counted from 0.
        position: position in the epoch.
        counts: whether the sample counts: False for padding and masked samples; None if the order has neither.
    """

    seed: int
    epoch: int
    position: int
    counts: bool | None

    def __new__(cls, number: int, seed: int, epoch: int, position: int, counts: bool | None = None) -> Self:
        """Create the number here, because an `int` cannot get its value in `__init__`."""
        index = super().__new__(cls, number)
        index.seed, index.epoch, index.position, index.counts = seed, epoch, position, counts
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedIndex, (int(self), self.seed, self.epoch, self.position, self.counts)

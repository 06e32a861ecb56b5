"""From the states that torch's loaders keep to the one of all loaders here: where in the order the run stands.

torchdata's `StatefulDataLoader` keeps what each worker, or the sampler, said of itself after the last batch that was
handed over, and takes it back at the same number of workers only. A position needs no workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.order import OrderState

_KIND: Final = "datasvc.loaders.torch"


@dataclass(frozen=True)
class ShareState:
    """What one process that draws batches says of itself.

    Attributes:
        position: where its next step starts; the end of the epoch if it has none.
        worker: which of the loader's workers it is; 0 in the main process.
        num_workers: of the loader; 0 in the main process.
        num_batches: drawn by it since the loader began.
        global_batch: positions of a step.
        num_samples: of the epoch.
        order: `OrderState` of the run when it began, as JSON values.
        kind: says what this is.
    """

    position: int
    worker: int
    num_workers: int
    num_batches: int
    global_batch: int
    num_samples: int
    order: dict[str, Any]
    kind: str = _KIND

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Any) -> ShareState:
        """Return what `to_dict` gave. Raises ConfigError."""
        if not _is_ours(state):
            raise ConfigError(f"this is no state of a data set or sampler of datasvc: {_shown(state)}")
        try:
            return cls(**state)
        except TypeError as error:
            raise ConfigError(f"this state is of another release: {error}") from error


def order_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a run stands, from any state of a loader over our data sets; good for any number of workers.

    Args:
        state: of a `StatefulDataLoader` with any workers, a `ResumableDataLoader` or any other loader of datasvc.

    Raises:
        ConfigError: it is none of these; or the loader's `batch_size` was not that of the order.
    """
    try:
        return _order_state(state)
    except KeyError as error:
        raise ConfigError(f"this state of torchdata lacks {error}; known are those of torchdata 0.11") from error


def _order_state(state: Mapping[str, Any]) -> dict[str, Any]:
    if "_snapshot" in state:
        snapshot = state["_snapshot"]
        drawn = snapshot["_main_snapshot"]["_sampler_iter_state"]
        shares = _shares(drawn, [worker["fetcher_state"] for worker in snapshot["_worker_snapshots"].values()])
        since = state["_steps_since_snapshot"]
        return _of_shares(shares, snapshot["_snapshot_step"], since, ended=state["_iterator_finished"])
    if "_num_yielded" in state:
        shares = _shares(state["_sampler_iter_state"], [state["fetcher_state"]])
        return _of_shares(shares, state["_num_yielded"], 0, ended=state["_iterator_finished"])
    return dict(state)


def _shares(drawn: Any, fetchers: Sequence[Any]) -> list[ShareState]:
    """Return what was said by our sampler, in the main process, or by our data set in all that fetch."""
    if _is_ours(drawn):
        return [ShareState.from_dict(drawn)]
    return [ShareState.from_dict(fetcher and fetcher["dataset_iter_state"]) for fetcher in fetchers]


def _of_shares(shares: Sequence[ShareState], num_handed: int, num_since: int, *, ended: bool) -> dict[str, Any]:
    """Return the position before which every step was handed over.

    Workers are asked in turn, so that is where the first of their next steps starts.

    Args:
        shares: of all that draw.
        num_handed: batches that the loader had handed over when they said so.
        num_since: batches handed over afterwards.
        ended: whether the epoch was over.
    """
    if sum(share.num_batches for share in shares) != num_handed:
        raise ConfigError(
            f"the loader handed over {num_handed} batches, made of {sum(share.num_batches for share in shares)} of "
            "the order: its batch_size is not that of the OrderBatchSampler; positions cannot be told from it"
        )
    first = shares[0]
    began = OrderState.from_dict(first.order)
    if ended:
        return replace(began, epoch=began.epoch + 1, position=0).to_dict()
    position = min(share.position for share in shares) + num_since * first.global_batch
    return replace(began, position=min(position, first.num_samples)).to_dict()


def _is_ours(state: Any) -> bool:
    return isinstance(state, Mapping) and state.get("kind") == _KIND


def _shown(state: Any) -> str:
    return f"the fields {sorted(state)}" if isinstance(state, Mapping) else repr(state)

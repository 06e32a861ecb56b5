"""torch's `DataLoader` with a resumable state that counts the batches handed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data

from datasvc.errors import ConfigError
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.iterable import IterableDataset
from datasvc.loaders.torch.sampler import OrderBatchSampler


class ResumableDataLoader(torch.utils.data.DataLoader[Any]):
    """A `DataLoader` in the access order, with a state: `for batch in loader` runs to the end of the epoch.

    The first `for` starts at the cursor that the data set or sampler has when the loader is created. After that only
    the loader's own state counts, so load states into the loader. The loader moves the cursor of its sampler or data
    set, so give each loader its own.

    A new `for` continues where the last one stopped: with the rest of the epoch, or with the next epoch. The state
    counts batches handed over; it is independent of prefetched batches and of the number of workers. All loaders of
    datasvc have the same state format, so a state of any of them can be loaded into any other.

    Args:
        data: an `IterableDataset`, which has a batch size; or any map-style data set, together with `batches`.
        batches: the order of a map-style data set.
        options: options of torch's `DataLoader`, except `batch_size`, `shuffle`, `sampler`, `batch_sampler`,
            `drop_last` and `in_order`, which follow from the order.

    Raises:
        ConfigError: `data` and `batches` do not go together; an option follows from the order; the splits differ.
    """

    def __init__(
        self,
        data: IterableDataset | torch.utils.data.Dataset[Any],
        batches: OrderBatchSampler | None = None,
        **options: Any,
    ) -> None:
        forbidden = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"} & options.keys()
        if forbidden:
            raise ConfigError(f"{sorted(forbidden)} follow from the order; leave them out")
        if isinstance(data, IterableDataset) and batches is None:
            self._source: IterableDataset | OrderBatchSampler = data
            options["batch_size"] = data.batch_size
        elif isinstance(batches, OrderBatchSampler) and not isinstance(data, torch.utils.data.IterableDataset):
            if isinstance(data, Dataset) and data.split.digest != batches.order.split.digest:
                raise ConfigError(
                    f"the data set is of {data.split!r}, the batches are of "
                    f"{batches.order.split!r}; give both one split"
                )
            self._source = batches
            options["batch_sampler"] = batches
        else:
            raise ConfigError(
                "expected a data set with an OrderBatchSampler, or only an IterableDataset of datasvc.loaders.torch; "
                f"got {type(data).__name__} and {type(batches).__name__}"
            )
        self._cursor = self._source.cursor
        super().__init__(data, **options)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._source.order.count_rank_batches()[0]

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0; a new `for` serves the rest of it."""
        return self._cursor[0]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the rest of the epoch. Raises the errors of reading and transforming samples, also from workers."""
        epoch, position = self._cursor
        self._source.seek(epoch, position)
        for batch in super().__iter__():
            step = self._source.order.step_at(position)
            assert step is not None
            position = step.next_position
            self._cursor = (epoch, position)
            yield batch
            if self._cursor != (epoch, position):
                return  # a state was loaded in the loop: the batches in progress belong to the old position
        self._cursor = (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the batches handed over so far, as JSON values."""
        return self._source.order.state_at(*self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was saved with any world size, batch size and number of workers.

        Args:
            state: state of any loader of datasvc, or of a `StatefulDataLoader` over the same samples.

        Raises:
            ConfigError: `state` is no loader state, or has a later format.
            StateMismatchError: the state belongs to another version or order; the message has both.
        """
        self._cursor = self._source.order.parse_state(state)

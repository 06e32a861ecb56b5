"""torch's own DataLoader that knows where it stands: after what was handed over, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data

from datasvc.errors import ConfigError
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.iterable import IterableDataset
from datasvc.loaders.torch.sampler import OrderBatchSampler


class ResumableDataLoader(torch.utils.data.DataLoader[Any]):
    """A `torch.utils.data.DataLoader` in our order, with a state: `for batch in loader` runs to the end of the epoch.

    The first `for` starts where its data set or sampler does when the loader is made: where `set_epoch` or
    `load_state_dict` put it. From then on the loader's own state counts: load states into the loader. It moves the
    sampler or data set along, so give each loader its own.

    A new `for` goes on where the last one stopped: the rest of the epoch, or the next epoch. What workers prefetched
    is never part of the state, nor is how many there are: it counts batches handed over, which says where the order
    stands. The state is that of all loaders of datasvc, and goes from any of them to any other.

    Args:
        data: an `IterableDataset`, whose batch size is used; or any map-style data set, with `batches`.
        batches: in which order a map-style data set is served.
        options: of torch's DataLoader, but `batch_size`, `shuffle`, `sampler`, `batch_sampler`, `drop_last` and
            `in_order`, which the order decides.

    Raises:
        ConfigError: neither of the two; an option that the order decides; batches of another split.
    """

    def __init__(
        self,
        data: IterableDataset | torch.utils.data.Dataset[Any],
        batches: OrderBatchSampler | None = None,
        **options: Any,
    ) -> None:
        decided = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"} & options.keys()
        if decided:
            raise ConfigError(f"the order decides {sorted(decided)}; leave it out")
        if isinstance(data, IterableDataset) and batches is None:
            self._source: IterableDataset | OrderBatchSampler = data
            options["batch_size"] = data.batch_size
        elif isinstance(batches, OrderBatchSampler) and not isinstance(data, torch.utils.data.IterableDataset):
            if isinstance(data, Dataset) and data.split.digest != batches.order.split.digest:
                raise ConfigError(f"the data set is of {data.split!r}, the batches are of {batches.order.split!r}")
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
        """Batches of a whole epoch."""
        return self._source.order.count_own()[0]

    @property
    def epoch(self) -> int:
        """The epoch that a new `for` serves the rest of, counted from 0."""
        return self._cursor[0]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the rest of the epoch. Raises what reading and transforming a sample raises, in workers too."""
        epoch, position = self._cursor
        self._source.seek(epoch, position)
        for batch in super().__iter__():
            step = self._source.order.step_at(position)
            assert step is not None
            position = step.next_position
            self._cursor = (epoch, position)
            yield batch
            if self._cursor != (epoch, position):
                return  # a state was loaded meanwhile: what workers have under way is no longer wanted
        self._cursor = (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands after the batches handed over so far, as JSON values."""
        return self._source.order.state_at(*self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, saved at any world size, batch size and number of workers.

        Args:
            state: of any loader of datasvc, or of a `StatefulDataLoader` over the same samples.

        Raises:
            ConfigError: not a state, or one of a later format.
            StateMismatchError: it belongs to another version or order; says both.
        """
        self._cursor = self._source.order.parse_state(state)

"""For jobs that keep torch's own data loaders and their own transforms: data sets and an order, exact over restarts.

The rest of `loaders` works without torch; nothing there imports this.
"""

from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.iterable import IterableDataset
from datasvc.loaders.torch.loader import ResumableDataLoader
from datasvc.loaders.torch.sampler import OrderBatchSampler
from datasvc.loaders.torch.served import ServedIndex
from datasvc.loaders.torch.states import order_state

__all__ = [
    "Dataset",
    "IterableDataset",
    "OrderBatchSampler",
    "ResumableDataLoader",
    "ServedIndex",
    "order_state",
]

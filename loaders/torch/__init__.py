"""For jobs that keep torch's own data loaders and their own transforms: data sets and an order, exact over restarts.

The rest of `loaders` works without torch; nothing there imports this.
"""

from loaders.torch.dataset import Dataset
from loaders.torch.iterable import IterableDataset
from loaders.torch.loader import ResumableDataLoader
from loaders.torch.sampler import OrderBatchSampler
from loaders.torch.served import ServedIndex
from loaders.torch.states import order_state

__all__ = [
    "Dataset",
    "IterableDataset",
    "OrderBatchSampler",
    "ResumableDataLoader",
    "ServedIndex",
    "order_state",
]

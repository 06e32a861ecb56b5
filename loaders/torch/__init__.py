"""Data sets, a batch sampler and a loader for programs that use torch's `DataLoader` and their own transforms.

Samples are served in the access order, and a run can resume at a position. The other packages of `datasvc.loaders`
work without torch and do not import this one.
"""

from datasvc.extras import explain_missing

with explain_missing("datasvc.loaders.torch"):
    from datasvc.loaders.torch.dataset import Dataset
    from datasvc.loaders.torch.iterable import IterableDataset
    from datasvc.loaders.torch.loader import ResumableDataLoader
    from datasvc.loaders.torch.recording import record_data_loaders
    from datasvc.loaders.torch.sampler import OrderBatchSampler
    from datasvc.loaders.torch.states import ServedIndex, order_state

record_data_loaders()

__all__ = [
    "Dataset",
    "IterableDataset",
    "OrderBatchSampler",
    "ResumableDataLoader",
    "ServedIndex",
    "order_state",
]

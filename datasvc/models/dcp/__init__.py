"""Sharded checkpoints: what torch.distributed.checkpoint saves and loads, as model versions.

`DcpWriter` and `DcpReader` are torch's StorageWriter and StorageReader, so its `save`, `load` and `async_save`, its
planners, DTensor and FSDP2 work as they do with files. Each rank stores the chunks that the planner gave it; then the
coordinator joins them to one ordinary tensor table and commits one version. Before that commit nothing is visible.
"""

from datasvc.models.dcp.reader import DcpReader
from datasvc.models.dcp.writer import DcpWriter

__all__ = ["DcpReader", "DcpWriter"]

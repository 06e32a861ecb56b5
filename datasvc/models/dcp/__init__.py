"""Sharded checkpoints: store the checkpoints of torch.distributed.checkpoint (DCP) as model versions.

`DcpWriter` and `DcpReader` implement torch's `StorageWriter` and `StorageReader`. `save`, `load` and `async_save`,
the planners, DTensor and FSDP2 therefore work as with files. Each rank stores the chunks that its plan assigns to it.
Then one rank, torch's coordinator, lists the chunks of all ranks in one ordinary tensor table, and commits one
version. Readers do not find the version before the commit. `DcpLoadPlanner` lists all differences between a state and
a checkpoint in one error.
"""

from datasvc.extras import explain_missing

with explain_missing("datasvc.models.dcp"):
    from datasvc.models.dcp.reader import DcpLoadPlanner, DcpReader
    from datasvc.models.dcp.writer import DcpWriter

__all__ = ["DcpLoadPlanner", "DcpReader", "DcpWriter"]

"""What the programs that save and restore sharded state agree on: whole tensors, and how ranks may hold them."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# Names, shapes, dtypes; rows that four ranks, or three, cannot share evenly, and fewer rows than ranks.
SHAPES = {
    "even": ((16, 6), torch.float32),
    "uneven": ((10, 5), torch.float32),
    "few": ((2, 3), torch.float64),
    "columns": ((3, 9), torch.bfloat16),
    "row": ((7,), torch.int64),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
    "large": ((512, 128), torch.float32),
}
VALUES = {"step": 12, "lr": 0.1, "betas": (0.9, 0.99), "schedule": {"milestones": [3, 5], "name": "cosine"}}


def whole_tensors():
    generator = torch.Generator().manual_seed(5)
    return {
        name: (torch.rand(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def placements(tensor, num_mesh_dimensions, layout):
    """Layouts "rows", "columns", "replicas" and, on two-dimensional meshes, "both" and "mixed"."""
    if not tensor.dim() or layout == "replicas":
        return [Replicate()] * num_mesh_dimensions
    last = Shard(tensor.dim() - 1)
    if num_mesh_dimensions == 1:
        return [{"rows": Shard(0), "columns": last}[layout]]
    return {"rows": [Shard(0), Shard(0)], "both": [Shard(0), last], "mixed": [Replicate(), Shard(0)]}[layout]


def distributed(tensors, mesh, layout):
    return {
        name: distribute_tensor(tensor.clone(), mesh, placements(tensor, mesh.ndim, layout), src_data_rank=None)
        for name, tensor in tensors.items()
    }


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_whole(state, expected):
    for name, tensor in expected.items():
        found = whole_of(state[name])
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name

"""Four ranks as 2 x 2, data by tensor parallel: peers get one batch, the pairs share the epoch, all of them a cache.

Takes the repository's URL and a folder that is empty.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.repository import Repository
from datasvc.shards import open_dataset

url, folder = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
split = open_dataset(Repository.open(url), "digits@1")["val"]
SIZES = {"size": 16, "decode": DecodeConfig(num_threads=1)}

with Cache(f"{folder}/cache", budget="100MB") as cache:
    loader = ImageLoader(split, batch_size=32, training=True, cache=cache, tail="short", **SIZES, ranks=mesh["data"])
    with loader:
        batches = [(batch.positions, batch.images) for batch in loader]
        state = loader.state_dict()
    dist.barrier()
    origin_bytes = cache.counters()["origin_bytes"]

found = [None] * 4
dist.all_gather_object(found, (mesh.get_coordinate(), batches, state))
served = []
for data_rank in range(2):
    (_, first, first_state), (_, second, second_state) = sorted(
        (each for each in found if each[0][0] == data_rank), key=lambda each: each[0][1]
    )
    assert first_state == second_state == state
    assert len(first) == len(second)
    for (positions, images), (others, other_images) in zip(first, second, strict=True):
        assert (positions == others).all()
        assert torch.equal(images, other_images)
        served += positions.tolist()
assert sorted(served) == list(range(len(split))), "the pairs share the epoch, each sample once"
# Not four times: what one rank brought, or read early, the others found here.
size_bytes = sum(info.size_bytes for info in split.table.shards())
assert origin_bytes <= 1.1 * size_bytes, (origin_bytes, size_bytes)
dist.destroy_process_group()

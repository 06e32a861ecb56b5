"""Two ranks with a cache folder each, or one for both: every shard leaves the origin once."""

import sys
from pathlib import Path

import torch.distributed as dist
from checking import raises

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.node.ranks import RankNodes
from datasvc.repository import Repository
from datasvc.shards import open_dataset

repo, root = sys.argv[1], Path(sys.argv[2])


def origin_bytes(cache):
    counted = [None] * dist.get_world_size()
    dist.all_gather_object(counted, (str(cache.folder), cache.counters().get("origin_bytes", 0)))
    return sum(dict(counted).values())


def check(folder):
    split = open_dataset(Repository.open(repo), "digits@1")["train"]
    with RankNodes(folder, (repo,), budget="50MB") as nodes, Cache(folder, peers=nodes.peers) as cache:
        cache.stage([split])
        dist.barrier()
        assert origin_bytes(cache) == split.table.size_bytes, cache.counters()
        assert cache.status().num_resident == split.table.num_shards
        dist.barrier()


dist.init_process_group("gloo")
check(root / f"own-{dist.get_rank()}")
check(root / "shared")

# A server that runs already on one node: every rank is told.
taken = root / f"taken-{dist.get_rank()}"
with RankNodes(taken, (repo,), budget="50MB"):
    with raises(ConfigError, "cannot serve the cache of the node"):
        RankNodes(taken, (repo,))
    dist.barrier()
# A failure on one rank alone is an error on all, and nobody waits for ever.
with raises(ConfigError, "1 rank cannot serve", "rank 1"):
    RankNodes(root / f"own-{dist.get_rank()}", (repo,), address="203.0.113.1" if dist.get_rank() else None)
dist.destroy_process_group()

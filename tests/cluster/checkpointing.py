"""One rank of a job with a rank on each node, whose versions are on the disks of the nodes and in a store.

python -m tests.cluster.checkpointing train|restore RANK SIZE FIRST_ADDRESS PORT URL
"""

import hashlib
import json
import logging
import signal
import sys

import torch
import torch.distributed as dist

import datasvc

NUM_STEPS = 4


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {"weights": {str(n): torch.randn(50_000, generator=generator) for n in range(6)}, "step": step}


def digest(tensors):
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def say(*values):
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def train(manager, rank):
    """Save each step to the nodes, every second one to the store too; say so, and wait to be killed."""
    manager.restore(default=None)
    for step in range(1, NUM_STEPS):
        to = manager.should_save(step)
        manager.save(state(step), rank_state={"rank": rank}, step=step, to=to, wait=True)
    manager.save(state(NUM_STEPS), rank_state={"rank": rank}, step=NUM_STEPS, to="nodes", wait=True)
    say("saved", digest(state(NUM_STEPS)["weights"]))
    signal.pause()


def restore(manager, rank):
    """Restore, say what was restored, and end as with an error: the store is not needed."""
    found = manager.restore()
    assert found.state["rank_state"][rank]["rank"] == rank
    came = dict(found.report.came_bytes)
    restored = [found.state["step"], digest(found.state["weights"]), str(found.version), came]
    manager.__exit__(None, RuntimeError("the end"), None)
    say("restored", *restored)


def main():
    action, rank, size, address, port, url = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=int(rank), world_size=int(size))
    repo = datasvc.open(url, unavailable_ok=action == "restore")
    manager = repo.models.manager("m", every=2, local="checkpoints", every_local=1, timeout_s=60)
    {"train": train, "restore": restore}[action](manager, int(rank))


if __name__ == "__main__":
    main()

"""Four ranks on three nodes that save on their disks; one node is killed and lost, then two. Prints what they found.

python local_saves.py FOLDER
"""

import datetime as dt
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import datasvc
from datasvc.errors import DatasvcError
from datasvc.models.local.local_folder import LocalFolder

RANKS, NODES = 4, 3  # the last two ranks are on one node
LAST_STEP = 5  # the newest that all nodes have


def state(step):
    return {"shared": torch.arange(6_000.0) + step, "step": step}


def divided(step):
    """Return a tensor of which each rank has a part."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return distribute_tensor(torch.arange(8_000.0).view(8, 1000) * step, mesh, [Shard(0)])


def own_state(rank, step):
    return {"own": torch.full((2_000,), 10.0 * step + rank), "rank": rank}


def node_of(rank):
    return min(rank, NODES - 1)


def manager_of(folder, rank):
    repo = datasvc.open(f"{folder}/repo")
    return repo.models.manager("m", every=3, local=f"{folder}/node{node_of(rank)}", every_local=1, timeout_s=20.0)


def train(folder, rank):
    """Save each step; rank 1 dies when the nodes publish the last one, and have sent each other the objects."""
    with manager_of(folder, rank) as manager:
        for step in range(1, LAST_STEP + 1):
            if (rank, step) == (1, LAST_STEP):
                LocalFolder.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            assert manager.should_save(step)
            handle = manager.save(
                {**state(step), "divided": divided(step)}, rank_state=own_state(rank, step), step=step
            )
            try:
                handle.result()
            except DatasvcError as error:
                return [step, type(error).__name__]
    return None


def restore(folder, rank):
    with manager_of(folder, rank) as manager:
        checkpoint = manager.restore()
        into = {"divided": divided(0)}
        assert manager.restore(into=into).version == checkpoint.version
    step = checkpoint.state["step"]
    assert torch.equal(checkpoint.state["shared"], state(step)["shared"])
    assert torch.equal(checkpoint.state["divided"], torch.arange(8_000.0).view(8, 1000) * step)
    assert torch.equal(into["divided"].to_local(), divided(step).to_local())
    for other, found in enumerate(checkpoint.state["rank_state"]):
        expected = own_state(other, step)
        assert found["rank"] == other
        assert torch.equal(found["own"], expected["own"])
    steps = [version.step for version in LocalFolder(f"{folder}/node{node_of(rank)}", "m").versions()]
    return [str(checkpoint.version), checkpoint.entry.get("parent"), steps]


def run_ranks(folder, name, action):
    """Run `action` on every rank, each forked from this process; print the results, None of one that was killed."""
    pids = []
    for rank in range(RANKS):
        pids.append(os.fork())
        if not pids[-1]:
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(f"{folder}/{name}.store", RANKS)
                timeout = dt.timedelta(seconds=30)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
                Path(f"{folder}/{name}.{rank}").write_text(json.dumps(action(folder, rank)))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    files = [Path(f"{folder}/{name}.{rank}") for rank in range(RANKS)]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()


def damage_one_of_two_copies(folder):
    """Change an object of the newest version on node 0, of which node 2 has a copy."""
    on_nodes = [
        {path.name: path for path in Path(f"{folder}/node{node}/m").glob(f"*{LAST_STEP}-*/objects/*/*")}
        for node in (0, 2)
    ]
    path = next(
        path for name, path in sorted(on_nodes[0].items()) if name in on_nodes[1] and path.stat().st_size > 5_000
    )
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def main():
    folder = sys.argv[1]
    datasvc.open(f"{folder}/repo", create=True)
    run_ranks(folder, "train", train)
    shutil.rmtree(f"{folder}/node1")
    shutil.copytree(f"{folder}/node2", f"{folder}/before")
    damage_one_of_two_copies(folder)
    os.rename(f"{folder}/repo/objects", f"{folder}/away")  # whatever is restored now comes from the other nodes
    run_ranks(folder, "one_lost", restore)
    os.rename(f"{folder}/away", f"{folder}/repo/objects")
    for node in range(NODES):
        shutil.rmtree(f"{folder}/node{node}")
    os.rename(f"{folder}/before", f"{folder}/node2")
    run_ranks(folder, "two_lost", restore)


if __name__ == "__main__":
    main()

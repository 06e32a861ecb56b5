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
    return distribute_tensor(torch.arange(80_000.0).view(8, 10_000) * step, mesh, [Shard(0)])


def own_state(rank, step):
    return {"own": torch.full((2_000,), 10.0 * step + rank), "rank": rank}


def node_of(rank):
    return min(rank, NODES - 1)


def manager_of(folder, rank):
    repo = datasvc.open(f"{folder}/repo")
    return repo.models.manager("m", every=3, local=f"{folder}/node{node_of(rank)}", every_local=1, timeout_s=20.0)


def leave(manager):
    """End the use of a manager as an error in the training does: nothing is committed."""
    manager.__exit__(None, RuntimeError("the training failed"), None)


def kill_node(folder):
    """Kill all processes of the last node, of which this is one."""
    for rank in (rank for rank in range(RANKS) if node_of(rank) == NODES - 1 and rank != RANKS - 2):
        os.kill(int(Path(f"{folder}/{rank}.pid").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder, rank):
    """Save each step; the last node dies as the nodes publish the last one, and have sent each other the objects."""
    Path(f"{folder}/{rank}.pid").write_text(str(os.getpid()))
    manager = manager_of(folder, rank)
    found = None
    for step in range(1, LAST_STEP + 1):
        if (rank, step) == (RANKS - 2, LAST_STEP):  # the leader of the last node
            LocalFolder.publish = lambda *_: kill_node(folder)
        to = manager.should_save(step)
        whole = {**state(step), "divided": divided(step)}
        handle = manager.save(whole, rank_state=own_state(rank, step), step=step, to=to)
        try:
            handle.result()
        except DatasvcError as error:
            found = [step, type(error).__name__]
    leave(manager)
    return found


def restore(folder, rank):
    """Restore whole, then into a state that has only this rank's part of the divided tensor."""
    manager = manager_of(folder, rank)
    into = {"divided": divided(0)}
    part = manager.restore(into=into)
    num_objects = len(list(Path(f"{folder}/node{node_of(rank)}/m").glob(f"*-{LAST_STEP:010d}-*/objects/*/*")))
    checkpoint = manager.restore()
    leave(manager)
    step = checkpoint.state["step"]
    assert part.version == checkpoint.version
    assert torch.equal(checkpoint.state["shared"], state(step)["shared"])
    assert torch.equal(checkpoint.state["divided"], torch.arange(80_000.0).view(8, 10_000) * step)
    assert torch.equal(into["divided"].to_local(), divided(step).to_local())
    for other, found in enumerate(checkpoint.state["rank_state"]):
        expected = own_state(other, step)
        assert found["rank"] == other
        assert torch.equal(found["own"], expected["own"])
    steps = [version.step for version in LocalFolder(f"{folder}/node{node_of(rank)}", "m").versions()]
    return [str(checkpoint.version), checkpoint.entry.get("parent"), steps, part.report.lost_steps, num_objects]


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
    """Change an object of the newest version on node 0, of which node 1 has a copy."""
    on_nodes = [
        {path.name: path for path in Path(f"{folder}/node{node}/m").glob(f"*{LAST_STEP}-*/objects/*/*")}
        for node in (0, 1)
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
    shutil.rmtree(f"{folder}/node2")
    shutil.copytree(f"{folder}/node1", f"{folder}/before")
    damage_one_of_two_copies(folder)
    os.rename(f"{folder}/repo/objects", f"{folder}/away")  # whatever is restored now comes from the other nodes
    run_ranks(folder, "one_lost", restore)
    os.rename(f"{folder}/away", f"{folder}/repo/objects")
    for node in range(NODES):
        shutil.rmtree(f"{folder}/node{node}")
    os.rename(f"{folder}/before", f"{folder}/node1")
    run_ranks(folder, "two_lost", restore)


if __name__ == "__main__":
    main()

"""Saves to the disk of a node that lose their power at each step of the publication, and what is restored then.

python local_power_cuts.py FOLDER NUM_SEEDS        run with the library of `power_cut.c`, whose log is FOLDER/unsynced
"""

import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch

import datasvc
from datasvc.models.local import local_folder
from datasvc.models.local.local_folder import LocalFolder
from datasvc.models.local.local_saves import LocalVersion
from tests.faults.power_cut import cut_power

POINTS = ("before the entry", "before the rename", "after the rename", "after the save", "before the branch")


def state(step):
    return {"weights": {str(n): torch.arange(20_000.0) + 1000 * n + step for n in range(4)}, "step": step}


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def save(folder, point):
    """Save step 1, continue with a manager of its own, and lose the power in step 2."""
    for step in (1, 2):
        manager = datasvc.open(f"{folder}/repo").models.manager(
            "m", every=100, local=f"{folder}/disk/node", every_local=1
        )
        if step == 2:
            if point == "before the branch":
                local_folder.write_file = die
            manager.restore()
            if point == "before the entry":
                LocalFolder.prepare = die
            if point == "before the rename":
                LocalFolder.publish = die
            if point == "after the rename":
                local_folder.fsync_folder = die
        manager.save(state(step), step=step, to="nodes", wait=True)
        if step == 1:
            manager.__exit__(None, RuntimeError("the end"), None)
    die()


def restore(folder, point):
    manager = datasvc.open(f"{folder}/repo").models.manager("m", local=f"{folder}/disk/node")
    found = manager.restore()
    step = found.state["step"]
    assert isinstance(found.version, LocalVersion)
    assert all(torch.equal(tensor, state(step)["weights"][name]) for name, tensor in found.state["weights"].items())
    assert found.report.lost_steps == 0
    assert step == 2 if point == "after the save" else step in (1, 2)
    manager.__exit__(None, RuntimeError("the end"), None)
    Path(folder, "step").write_text(str(step))


def in_child(action, *arguments):
    pid = os.fork()
    if not pid:
        try:
            action(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    folder, num_seeds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    datasvc.open(f"{folder}/repo", create=True)
    lost, restored = Counter(), Counter()
    for seed in range(num_seeds):
        for point in POINTS:
            assert in_child(save, folder, point) == -signal.SIGKILL, (seed, point)
            num_bytes, num_names = cut_power(folder / "disk", folder / "unsynced", random.Random(seed))
            lost.update(bytes=num_bytes, names=num_names)
            assert in_child(restore, folder, point) == 0, (seed, point)
            restored[f"{point}: {(folder / 'step').read_text()}"] += 1
            shutil.rmtree(folder / "disk/node")
            (folder / "unsynced").write_bytes(b"")
    sys.stdout.write(json.dumps([lost, restored]) + "\n")


if __name__ == "__main__":
    main()

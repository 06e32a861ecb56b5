"""Trains the digits in rounds with leases, with speeds that are given in place of measured ones.

Takes JSON with a list of runs, one after the other: "settings"; "slowness": seconds of a step of each rank, as if
measured; "log": folder in which each rank writes what it trained on, step by step; "kill_at": a rank and the number
of its steps after which it kills itself; "forget": a version and keys of samples that it forgets, or that a new run
masks from its beginning if there are settings too.
"""

import json
import os
import signal
import sys
from hashlib import sha256

import torch

import datasvc
import datasvc.trainer as hvd
import datasvc.trainer.recipes.train as recipe
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.trainer.recipes.masking import configs_of_plan
from datasvc.trainer.recipes.optimizers.leased_rounds import LeasedRounds
from datasvc.trainer.recipes.settings.config import TrainConfig

torch.set_num_threads(1)
real = recipe.update
job, taken = {}, []


def update(run, batch, mark):
    state = run.loader.state_dict()
    seen = {
        "step": run.step + 1, "rank": hvd.rank(), "epoch": batch.epoch, "keys": batch.keys,
        "positions": batch.positions.tolist(), "mask": batch.mask.tolist(),
        "pixels": sha256(batch.images.numpy().tobytes()).hexdigest(),
        "state": [state["epoch"], state["position"]], "progress": run.loader.progress,
    }  # fmt: skip
    with open(f"{job['log']}/{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(seen) + "\n")
    if [hvd.rank(), len(taken)] == job.get("kill_at"):
        for handle, _ in run.saves:
            handle.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    taken.append(run.step)
    return real(run, batch, mark)


recipe.update = update
LeasedRounds._measure_s = lambda self: self._num_steps * job["slowness"][hvd.rank()]
for job in json.loads(sys.argv[1]):
    taken, plan = [], None
    configs = [TrainConfig(**job["settings"])] if "settings" in job else []
    if "forget" in job:
        repo = datasvc.open(job["repo"])
        plan = repo.models.plan_forget(*job["forget"])
        if configs:
            plan = ForgetPlan(plan.model, 1, None, None, 0, 0, (), plan.masked)
    for config in configs or configs_of_plan(repo, plan):
        recipe.train(config, plan)
    hvd.shutdown()

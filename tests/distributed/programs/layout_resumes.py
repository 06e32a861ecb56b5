"""Trains a small GPT at some layouts, and continues or starts runs from their versions at others.

Takes a URL and JSON with "layouts": settings by name; "save": names of layouts to train at; "resume": pairs of names,
the run to continue and the layout; "init": pairs of the run whose weights a new run starts with, and the layout; and
"refuse": pairs as in "resume", whose error each rank prints as a line of JSON.
With the setting "kill_at", rank 2 kills itself before the step after so many others; with "stop_in", "start", "step"
or "close", the last rank stops itself there. The losses that the logs of the runs have are those of the global batch.
"""

import contextlib
import json
import os
import signal
import sys
from unittest import mock

import torch

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from datasvc.trainer.recipes.update import update

URL, REQUEST = sys.argv[1:]
BLOCK, STEPS, MORE_STEPS = 8, 3, 6
torch.set_num_threads(1)


@contextlib.contextmanager
def updates(kill_at, stop_in):
    module = sys.modules[train.__module__]

    def stop(part):
        if stop_in == part and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopping(part, function):
        def call(*arguments, **options):
            stop(part)
            return function(*arguments, **options)

        return mock.patch.object(module, function.__name__, call)

    def step(run, *arguments):
        if run.step == kill_at and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        stop("step")
        return hvd.allreduce(update(run, *arguments), name="test.loss")

    with (
        mock.patch.object(module, "update", step),
        stopping("start", module.start),
        # The last save is queued before this call, and written after it.
        stopping("close", module.commit),
    ):
        yield


def run(name, settings, *, steps, **options):
    settings = {**settings}
    with updates(settings.pop("kill_at", None), settings.pop("stop_in", None)):
        train_once(name, settings, steps=steps, **options)


def train_once(name, settings, *, steps, **options):
    # `train` connects the ranks, so disconnect them before the next run.
    train(
        TrainConfig(
            **{
                "repo": URL,
                "data": "tokens@1",
                "name": name,
                "model": "gpt",
                "model_option": ("layers=2", "heads=4", "width=32", "dropout=0.0", f"context={BLOCK}"),
                "vocabulary": 29,
                "epochs": 10,
                "max_steps": steps,
                "global_batch": 8,
                "optimizer": "adamw",
                "learning_rate": 3e-3,
                "schedule": "constant",
                "warmup_epochs": 0.0,
                "clip_norm": 0.5,
                "ema_decay": 0.9,
                "evaluate_every": None,
                **options,
                **settings,
            }
        )
    )
    hvd.shutdown()


def refuse(saved, settings):
    try:
        run(f"{saved}-refused", settings, steps=MORE_STEPS, resume=f"{saved}@1")
    except ConfigError as error:
        sys.stdout.write(json.dumps({"rank": hvd.rank(), "error": str(error)}) + "\n")
        sys.stdout.flush()
    hvd.shutdown()


request = json.loads(REQUEST)
layouts = request["layouts"]
for name in request["save"]:
    run(name, layouts[name], steps=STEPS, resume="never")
for saved, name in request["resume"]:
    run(f"{saved}-then-{name}", layouts[name], steps=MORE_STEPS, resume=f"{saved}@1")
for saved, name in request["init"]:
    # Some layers begin with random weights. Nothing is trained, so weights stay the same.
    options = {
        "init_from": f"{saved}@1",
        "init_exclude": ("blocks.1.mlp", "norm"),
        "learning_rate": 0.0,
        "weight_decay": 0.0,
    }
    run(f"{saved}-into-{name}", layouts[name], steps=1, **options)
for saved, name in request.get("refuse", []):
    refuse(saved, layouts[name])

"""Trains a small GPT at some layouts, then continues runs at other layouts. Takes a URL and JSON.

The JSON has "layouts": settings by name; "save": names of layouts to train from the start; and "resume": pairs of
names, the run to continue and the layout.
"""

import json
import sys

import torch

import datasvc.trainer as hvd
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train

URL, REQUEST = sys.argv[1:]
BLOCK, STEPS, MORE_STEPS = 8, 3, 6
torch.set_num_threads(1)


def run(name, settings, *, steps, resume):
    # `train` connects the ranks; the next run connects them anew.
    train(
        TrainConfig(
            **{
                "repo": URL,
                "data": "tokens@1",
                "name": name,
                "model": "gpt",
                "model_option": ("layers=4", "heads=4", "width=32", "dropout=0.0", f"context={BLOCK}"),
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
                "resume": resume,
                **settings,
            }
        )
    )
    hvd.shutdown()


request = json.loads(REQUEST)
layouts = request["layouts"]
for name in request["save"]:
    run(name, layouts[name], steps=STEPS, resume="never")
for saved, name in request["resume"]:
    run(f"{saved}-then-{name}", layouts[name], steps=MORE_STEPS, resume=f"{saved}@1")

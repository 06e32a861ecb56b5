"""A training whose numbers a tracker gets: the same at each start, killed after a step if one asks for it."""

import os
import signal
import sys
from importlib import import_module

import torch

import datasvc

NUM_STEPS, EVERY = 6, 2


def train(repo, name, log, config, *, killed_after=None):
    """Train from the newest version to step `NUM_STEPS`; call `log(step, loss)` after each step."""
    net = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(net.weight, 1.0)
    torch.nn.init.constant_(net.bias, 1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    with repo.models.manager(name) as model:
        found = model.restore(default=None)
        step = 0
        if found is not None:
            step = found.entry["step"]
            net.load_state_dict(found.state["net"])
            optimizer.load_state_dict(found.state["optimizer"])
        while step < NUM_STEPS:
            step += 1
            loss = net(torch.full((1, 2), float(step))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(step, loss.item())
            if step % EVERY == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                model.save(state, step=step, config=config, wait=True)
            if step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)


def main(url, tracker_name, killed_after):
    """Train with a tracker; 0 kills nothing."""
    tracker = import_module(f"datasvc.integrations.{tracker_name}")
    repo = datasvc.open(url)
    options = {} if tracker_name == "mlflow" else {"project": "p"}
    with tracker.start_run(repo, tracker_name, **options) as run:

        def log(step, loss):
            if tracker_name == "mlflow":
                tracker.mlflow.log_metric("loss", loss, step=step)
            else:
                run.log({"loss": loss}, step=step)

        train(repo, tracker_name, log, tracker.run_config(run), killed_after=int(killed_after))


if __name__ == "__main__":
    main(*sys.argv[1:])

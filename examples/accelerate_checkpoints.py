"""Training with accelerate, checkpoints as versions of a model: killed and started again it ends with the same bits.

    accelerate launch examples/accelerate_checkpoints.py --repo REPO --data digits@1

They take the place of `accelerator.save_state` and `load_state`; nothing takes that of `skip_first_batches`, because
the loader knows its place.
"""

import argparse
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn

import datasvc
from datasvc.loaders import DataRanks, ImageLoader
from datasvc.models import ConsumptionTracker
from datasvc.trainer.recipes.random_state import capture, reinstate


def build_net(num_classes: int, size: int) -> nn.Module:
    """Return something to train, which draws random numbers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten()),
        nn.Linear(8 * (size // 2) ** 2, num_classes),
    )


def main() -> None:
    """Train; continue from the newest version where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", default="accelerate")
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--every", default="10min", help='a time, "10min", or a number of steps')
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    repo = datasvc.open(args.repo)
    split = repo.dataset(args.data)["train"]
    loader = ImageLoader(
        split,
        batch_size=args.batch_size,
        training=True,
        size=args.size,
        device=str(accelerator.device),
        ranks=DataRanks(accelerator.process_index, accelerator.num_processes),
    )
    net = build_net(len(split.classes), args.size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)  # not the loader, which knows its rank
    bare = accelerator.unwrap_model(net)
    every = int(args.every) if args.every.isdecimal() else args.every

    # Opened once the ranks have met: they save together, and end together after SIGTERM or Ctrl-C.
    with loader, repo.models.manager(args.name, every=every, grace="30s") as versions:
        (newest,) = broadcast_object_list([versions.newest_step()])
        if newest is not None:
            state = versions.restore().state
            bare.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            loader.load_state_dict(state["loader"])
            if len(state["rank_state"]) == accelerator.num_processes:
                reinstate(state["rank_state"][accelerator.process_index])
        step = newest or 0
        reading = ConsumptionTracker(loader, step=step)

        def save(loss: torch.Tensor) -> None:
            state = {
                "net": bare.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "loader": loader.state_dict(),
            }
            about = {"step": step, "data": [reading.use()], "metrics": {"loss": loss.item()}}
            versions.save(state, rank_state=capture(), **about)
            accelerator.print(f"step {step}: newest version {versions.version}", flush=True)

        while loader.epoch < args.epochs and versions.stop_signal is None:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(net(images), labels.to(accelerator.device))
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                is_last = loader.epoch == args.epochs - 1 and not loader.steps_left
                if versions.should_save(step) or is_last:
                    save(loss)
                if versions.stop_signal is not None:
                    break
    if versions.stop_signal is not None:
        sys.exit(128 + versions.stop_signal)


if __name__ == "__main__":
    main()

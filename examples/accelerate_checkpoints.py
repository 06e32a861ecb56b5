"""Training with accelerate, checkpoints as versions of a model: killed and started again it ends with the same bits.

    accelerate launch examples/accelerate_checkpoints.py --repo REPO --data digits@1

`AcceleratorVersions` takes the place of `accelerator.save_state` and `load_state`. `skip_first_batches` is not
needed: the loader continues at its position.
"""

import argparse
import logging
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import datasvc
from datasvc.integrations.accelerate import AcceleratorVersions
from datasvc.loaders import DataRanks, ImageLoader


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

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("datasvc.integrations").setLevel(logging.INFO)  # a line for each save
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
    every = int(args.every) if args.every.isdecimal() else args.every
    objects = {"net": net, "optimizer": optimizer, "schedule": schedule}
    options = {"every": every, "grace": "30s", "config": vars(args)}
    with loader, AcceleratorVersions(accelerator, repo, args.name, objects, loader=loader, **options) as versions:
        step = versions.restore()
        while loader.epoch < args.epochs and versions.stop_signal is None:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(net(images), labels.to(accelerator.device))
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                is_last = loader.epoch == args.epochs - 1 and not loader.steps_left
                versions.step(step, metrics={"loss": loss}, is_last=is_last)
                if versions.stop_signal is not None:
                    break
    if versions.stop_signal is not None:
        sys.exit(128 + versions.stop_signal)


if __name__ == "__main__":
    main()

"""Training that goes on when machines come and go, and still serves each sample once.

    python -m trainer.launch --host-discovery-script ./hosts.sh --min-num-proc 1 \
        python examples/elastic_training.py --repo REPO --data digits@1

`hosts.sh` prints the hosts of now, a line each, such as `node1:8`. A rank that dies costs the steps since
the last commit: the processes that are left take them again, with the same samples.
"""

import argparse

import torch
from torch import nn

import datasvc
import trainer as hvd
from loaders import ImageLoader
from trainer.recipes.models import build_model


def main() -> None:
    """Train with a global batch that stays the same, whatever the number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--global-batch-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--commit-every", type=int, default=5, help="steps")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    split = datasvc.open(args.repo).dataset(args.data)["train"]
    model = build_model(args.model, len(split.classes))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )

    def make_loader(rank: int, size: int) -> ImageLoader:
        return ImageLoader(
            split,
            batch_size=args.global_batch_size // size,
            training=True,
            size=args.size,
            data_rank=rank,
            data_world_size=size,
        )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.loader.epoch < args.epochs:
            for images, labels in state.loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                state.loss = loss.item()
                state.step += 1
                if state.step % args.commit_every == 0:
                    state.commit()
            state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.loader.epoch}: step {state.step}, {hvd.size()} ranks, loss {state.loss:.3f}")

    loader = hvd.elastic.ElasticLoader(make_loader)
    # The loss as well: a rank that comes at the end of an epoch has no batch to compute it from.
    train(hvd.elastic.TorchState(model, optimizer, loader=loader, step=0, loss=0.0))


if __name__ == "__main__":
    main()

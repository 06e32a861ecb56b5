"""ResNet-50 with a loop of your own: loader, optimizer and checkpoints are three lines each.

    python -m datasvc.trainer.launch -np 8 python examples/imagenet_resnet50.py --repo REPO --data imagenet@1

The program `python -m datasvc.trainer` does more (warm-up, LARS, mixed precision, evaluation) with the same parts.
"""

import argparse

import torch
from torch import nn

import datasvc
import datasvc.trainer as hvd
from datasvc.cache import Cache
from datasvc.loaders import DataRanks, ImageLoader
from datasvc.models import DataUse
from datasvc.trainer.recipes.models import build_model


def main() -> None:
    """Train, and commit a checkpoint after each epoch; continue from the newest one where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache")
    parser.add_argument("--cache-budget")
    parser.add_argument("--name", default="imagenet-resnet50")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--size", type=int, default=224)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    repo = datasvc.open(args.repo)
    dataset = repo.dataset(args.data)
    cache = Cache(args.cache, budget=args.cache_budget) if args.cache else None
    loader = ImageLoader(
        dataset["train"],
        batch_size=args.batch_size,
        training=True,
        size=args.size,
        cache=cache,
        device=str(device),
        ranks=DataRanks(hvd.rank(), hvd.size()),
    )
    model = build_model(args.model, len(dataset["train"].classes)).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0125 * hvd.size(), momentum=0.9, weight_decay=5e-5, nesterov=True),
        named_parameters=model.named_parameters(),
    )

    # Rank 0 looks, for all: another job may commit a version between two looks.
    versions = repo.models.versions(args.name)
    newest = hvd.broadcast_object(str(versions[-1]) if versions else None, name="newest")
    if newest:
        state = repo.models.restore(newest, cache=cache).state
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    while loader.epoch < args.epochs:
        epoch, total, steps = loader.epoch, torch.zeros(1), 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach().cpu()
            steps += 1
        mean = hvd.allreduce(total / max(steps, 1), name="loss").item()
        if hvd.rank() == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            use = DataUse(str(dataset.resolved), "train", loader.state_dict())
            version = repo.models.save(args.name, state, step=(epoch + 1) * steps, data=[use], metrics={"loss": mean})
            print(f"epoch {epoch}: loss {mean:.3f}, {version}")
    loader.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()

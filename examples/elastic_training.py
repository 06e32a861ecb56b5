"""Training that goes on when machines come and go, and still serves each sample once.

    python -m datasvc.trainer.launch --host-discovery-script ./hosts.sh --min-num-proc 1 \
        python examples/elastic_training.py --repo REPO --data digits@1

`hosts.sh` prints the hosts of now, a line each, such as `node1:8`. A rank that dies costs the steps since
the last commit: the processes that are left take them again, with the same samples. Who joins, or comes again, gets
the state from the memory of one that lived on; where nobody did, it is the newest version in the repository.
"""

import argparse

import torch
from torch import nn

import datasvc
import datasvc.trainer as hvd
from datasvc.loaders import DataRanks, ImageLoader
from datasvc.models import Checkpoint, CheckpointManager, ConsumptionTracker
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.rejoin import take_newest


def main() -> None:
    """Train with a global batch that stays the same, whatever the number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--global-batch-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--commit-every", type=int, default=5, help="steps; a commit keeps the state in memory")
    parser.add_argument("--name", default="elastic", help="of the model")
    parser.add_argument("--save-every", default="10min", help='a time, "10min", or a number of steps')
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    repo = datasvc.open(args.repo)
    split = repo.dataset(args.data)["train"]
    save_every = int(args.save_every) if args.save_every.isdecimal() else args.save_every
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
            ranks=DataRanks(rank, size),
        )

    def load(checkpoint: Checkpoint) -> None:
        saved = checkpoint.state
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.loader.load_state_dict(saved["loader"])
        state.step, state.loss = saved["step"], saved["loss"]
        state.version, state.consumed = str(checkpoint.version), None

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        versions = repo.models.manager(
            args.name, every=save_every
        )  # made each time: those who are there now save together
        try:
            with versions:
                train_until_ranks_change(state, versions)
        finally:
            note_version(versions)  # closed, it knows the last one too

    def train_until_ranks_change(state: hvd.elastic.TorchState, versions: CheckpointManager) -> None:
        newest = take_newest(state, versions, load)
        if hvd.rank() == 0:
            print(f"step {newest.step} from {newest.source}, {hvd.size()} ranks", flush=True)
        # The versions of one run are known by it, whoever is rank 0. It goes on where the state was in memory.
        reading = ConsumptionTracker(state.loader, step=state.step)
        state.consumed = hvd.broadcast_object(state.consumed or reading.state_dict(), name="consumed")
        reading.load_state_dict(state.consumed)
        parent = state.version  # of the first that is saved; the next ones continue that

        while state.loader.epoch < args.epochs:
            for images, labels in state.loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                state.loss = loss.item()
                state.step += 1
                if versions.should_save(state.step):
                    save(versions, reading, parent)
                    parent = None
                if state.step % args.commit_every == 0:
                    commit(versions, reading)
            commit(versions, reading)
            if hvd.rank() == 0:
                print(
                    f"epoch {state.loader.epoch}: step {state.step}, {hvd.size()} ranks, loss {state.loss:.3f}",
                    flush=True,
                )
        save(versions, reading, parent)

    def save(versions: CheckpointManager, reading: ConsumptionTracker, parent: str | None) -> None:
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": state.loader.state_dict(),
            "step": state.step,
            "loss": state.loss,
        }
        versions.save(saved, step=state.step, data=[reading.use()], metrics={"loss": state.loss}, parent=parent)

    def commit(versions: CheckpointManager, reading: ConsumptionTracker) -> None:
        state.consumed = reading.state_dict()
        note_version(versions)
        state.commit()

    def note_version(versions: CheckpointManager) -> None:
        if versions.version is not None:
            state.version = str(versions.version)

    # With all that goes on with the weights: the loss, which a rank that comes at the end of an epoch cannot compute;
    # the version that they continue, and what they consumed since.
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        loader=hvd.elastic.ElasticLoader(make_loader),
        step=0,
        loss=0.0,
        version=None,
        consumed=None,
    )
    train(state)


if __name__ == "__main__":
    main()

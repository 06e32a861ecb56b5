"""A script as people wrote them for Horovod, on handwritten digits: only its import was changed.

python -m datasvc.trainer.launch -np 2 python examples/horovod_mnist.py --epochs 5
"""

import argparse

import sklearn.datasets
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import datasvc.trainer as hvd  # was: import horovod.torch as hvd


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, float32[batch, 10], of float32[batch, 1, 8, 8]."""
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(self.dropout(x.flatten(1))))
        return functional.log_softmax(self.fc2(x), dim=1)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,500 digits to train on and 297 to test with."""
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def metric_average(value: float, name: str) -> float:
    """Return the mean over the ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    sampler: DistributedSampler,
    epoch: int,
) -> None:
    """Run an epoch."""
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, sampler: DistributedSampler) -> None:
    """Print loss and accuracy over all ranks."""
    model.eval()
    loss, correct = 0.0, 0.0
    for data, target in loader:
        output = model(data)
        loss += functional.nll_loss(output, target, reduction="sum").item()
        correct += (output.argmax(1) == target).sum().item()
    loss = metric_average(loss / len(sampler), "avg_loss")
    accuracy = metric_average(correct / len(sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: average loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    train_set, test_set = load_digits()
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=256, sampler=test_sampler)

    model = Net()
    # By default, Adasum doesn't need scaling up the learning rate.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.9)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, train_sampler, epoch)
        test(model, test_loader, test_sampler)


if __name__ == "__main__":
    main()

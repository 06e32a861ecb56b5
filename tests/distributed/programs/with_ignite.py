"""pytorch-ignite with backend="horovod": under a launcher, or starting argv[1] ranks itself."""

import sys

import ignite.distributed as idist
import torch


def training(local_rank, how):
    rank, size = idist.get_rank(), idist.get_world_size()
    assert (idist.backend(), size) == ("horovod", 2)
    assert idist.all_reduce(torch.tensor([float(rank)])).item() == 1.0
    assert idist.all_reduce(rank, op="MAX") == 1
    assert idist.all_gather(torch.tensor([rank])).tolist() == [0, 1]
    assert idist.broadcast(torch.tensor([rank + 5.0]), src=1).item() == 6.0
    idist.new_group([0])
    torch.manual_seed(rank)
    model = idist.auto_model(torch.nn.Linear(3, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    weights = idist.all_gather(model.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    idist.barrier()
    sys.stdout.write(f"rank {rank} was {how}\n")


if __name__ == "__main__":
    num_ranks = int(sys.argv[1]) or None
    with idist.Parallel(backend="horovod", nproc_per_node=num_ranks) as parallel:
        parallel.run(training, "spawned" if num_ranks else "launched")

"""A program for Horovod, with not a word changed: nothing here names the trainer."""

import sys

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import allreduce_async, synchronize

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
sampler = hvd.elastic.ElasticSampler(range(8))


@hvd.elastic.run
def train(state):
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1)).backward()
        optimizer.step()
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, sampler=sampler))
checksum = model.weight.data.sum()
if not torch.allclose(synchronize(allreduce_async(checksum, name="checksum")), checksum):
    raise HorovodInternalError("the ranks have trained different models")
sys.stdout.write(f"{hvd.rank()} of {hvd.size()} by {horovod.__version__}\n")

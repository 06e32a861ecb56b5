"""Elastic training on token blocks, disturbed as told. What was served and lost is part of the state.

Takes the repository's URL, the digest of a split's table, a file for the result, and JSON:
    faults: by number of the worker (in the order of their starts), a point and a count: the worker kills itself there
        when the step, or for "sync", "connect", "groups" and "choose" the round it is in, is this.
    sizes: by step, how many ranks must be there before it begins.
    epochs: how many.
    cache: folder of a cache, for a windowed order that the ranks derive together.
    bucket_bytes: argument of the optimizer.
"""

import json
import os
import signal
import sys
from pathlib import Path

from datasvc.trainer.fast_imports import fast_imports

with fast_imports():
    import torch
    import torch._dynamo  # the first optimizer imports it

import datasvc.trainer as hvd
from datasvc.loaders import DataRanks, TokenLoader
from datasvc.loaders.core import derived_order
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import Split
from datasvc.trainer.rendezvous import round as elastic_round
from datasvc.trainer.rendezvous.rendezvous import current_rendezvous

URL, DIGEST, RESULT = sys.argv[1:4]
TOLD = json.loads(sys.argv[4])
GLOBAL_BATCH = 12
NUMBER = os.environ.get("TRAINER_ELASTIC_WORKER", "localhost:0:0").rpartition(":")[2]
POINT, COUNT = TOLD.get("faults", {}).get(NUMBER, (None, None))


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def reach(point, count):
    if (point, count) != (POINT, COUNT):
        return
    if os.environ.get("FAULT") == "error":
        raise TypeError("a program's own fault")
    if os.environ.get("FAULT") == "end":
        sys.exit(0)
    if os.environ.get("FAULT") == "stop":
        say("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


class State(hvd.elastic.TorchState):
    """Reaches points inside of a commit and of a sync."""

    def save(self):
        reach("commit", self.step)
        super().save()

    def check_host_updates(self):
        reach("saved", self.step)
        super().check_host_updates()

    def sync(self):
        reach("sync", rounds())
        for name in ("model", "optimizer"):
            self._handlers[name].sync()
        reach("half synced", rounds())
        super().sync()


def rounds():
    current = current_rendezvous()
    return 0 if current is None else current.assignment.round_number


def reaching(point, function):
    def reached(*arguments, **options):
        reach(point, rounds())
        return function(*arguments, **options)

    return reached


elastic_round._connect = reaching("connect", elastic_round._connect)
elastic_round.GroupTransport = reaching("groups", elastic_round.GroupTransport)
derived_order.choose_windowed = reaching("choose", derived_order.choose_windowed)

hvd.init()
torch.manual_seed(int(NUMBER))  # every worker its own weights: only rank 0's of the first round count
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    sgd, named_parameters=model.named_parameters(), bucket_bytes=TOLD.get("bucket_bytes")
)
split = Split("train", "tokens@1", Repository.open(URL), DIGEST)


def make_loader(rank, size):
    batch_size = GLOBAL_BATCH // size
    options = {"cache": TOLD["cache"], "shuffle": "windowed"} if "cache" in TOLD else {}
    return TokenLoader(split, batch_size=batch_size, training=True, ranks=DataRanks(rank, size), **options)


loader = hvd.elastic.ElasticLoader(make_loader)
state = State(model, optimizer, loader=loader, step=0, losses=[], served=[], sizes=[])
resets, threads, files = [], [], []


def on_reset():
    resets.append(hvd.size())
    threads.append(len(os.listdir("/proc/self/task")))
    files.append(len(os.listdir("/proc/self/fd")))


state.register_reset_callbacks([on_reset])
model[0].weight.register_post_accumulate_grad_hook(lambda _: reach("backward", state.step))


def await_ranks():
    # Rank 0 hears of hosts here, so this ends when the ranks that are wanted have come or gone.
    while hvd.size() != TOLD.get("sizes", {}).get(str(state.step), hvd.size()):
        state.check_host_updates()


@hvd.elastic.run
def train(state):
    if not state.step:
        # The start of every rank is rank 0's of the first round.
        say("begins in round", rounds(), "as rank", hvd.rank(), "of", hvd.size(), "in process", os.getpid())
    while loader.epoch < TOLD.get("epochs", 2):
        await_ranks()
        for batch in state.loader:
            reach("step", state.step)
            x = batch.tokens / 960.0
            optimizer.zero_grad()
            loss = (model(x).squeeze(1) - x.square().mean(1)).square().mean()
            loss.backward()
            optimizer.step()
            positions = [p for ranks in hvd.allgather_object(batch.positions.tolist()) for p in ranks]
            state.losses.append(hvd.allreduce(loss.detach()).item())
            state.served.append([batch.epoch, sorted(positions)])
            state.sizes.append(hvd.size())
            state.step += 1
            state.commit()
            if hvd.rank() == 0:
                say("committed", state.step, "of", hvd.size())
            await_ranks()


train(state)
if hvd.rank() == 0:
    facts = {"losses": state.losses, "served": state.served, "sizes": state.sizes}
    facts["weights"] = [parameter.flatten().tolist() for parameter in model.parameters()]
    facts |= {"resets": resets, "threads": threads, "files": files, "pid": os.getpid()}
    Path(RESULT).write_text(json.dumps(facts))
say("ends after", len(resets), "resets as rank", hvd.rank(), "of", hvd.size(), "in process", os.getpid())
hvd.shutdown()

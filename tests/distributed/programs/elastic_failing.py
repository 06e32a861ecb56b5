"""Elastic counting to 6, in which some ranks fail at step 3. Each says what its environment says of its place.

Arguments:
    the ranks of the first round that fail, comma-separated; "all" for any rank of any round;
    how: "error", a status for sys.exit, "caught" for an error that the program catches and prints before it exits
        with status 1, or "vanish" for os._exit with status 0.
"""

import os
import sys

import torch

import datasvc.trainer as hvd

VICTIMS, HOW = sys.argv[1:3]
NAMES = (
    "RANK",
    "WORLD_SIZE",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "LOCAL_RANK",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def place():
    return " ".join(os.environ[name] for name in NAMES)


say("started as", place())
is_victim = os.environ["RANK"] in VICTIMS.split(",")
hvd.init()
state = hvd.elastic.ObjectState(step=0)


@hvd.elastic.run
def train(state):
    while state.step < 6:
        if state.step == 3 and (VICTIMS == "all" or is_victim):
            if HOW == "vanish":
                os._exit(0)
            if HOW in ("error", "caught"):
                raise MemoryError(f"no memory left on rank {hvd.rank()}")
            sys.exit(int(HOW))
        hvd.allreduce(torch.ones(1), name="step")
        state.step += 1
        state.commit()


try:
    train(state)
except MemoryError as error:
    if HOW != "caught":
        raise
    say("caught:", error)
    sys.exit(1)
say("ends at", state.step, "as", place())

"""The last rank is killed in the middle of its work, on tensors of argv[1] numbers; the others must hear of it.

They can end in order.
"""

import faulthandler
import os
import signal
import sys

import torch
from checking import raises

import datasvc.trainer as hvd

faulthandler.enable()
NUM_NUMBERS = int(sys.argv[1])
KILL_AT = 100 if NUM_NUMBERS < 10_000 else 3

# The launcher ends the survivors; this gives them the time to say what they saw.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
with raises(hvd.HorovodInternalError, "rank ", "failed during"):
    for step in range(10 * KILL_AT):
        if step == KILL_AT and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(NUM_NUMBERS), name="work")
with raises(hvd.HorovodInternalError):
    hvd.barrier()
sys.stderr.write("survived\n")
hvd.shutdown()

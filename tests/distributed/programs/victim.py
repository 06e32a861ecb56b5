"""The last rank is killed in the middle of its work; the others must hear of it and can end in order."""

import os
import signal
import sys

import torch
from checking import raises

import trainer as hvd

# The launcher ends the survivors; this gives them the time to say what they saw.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
with raises(hvd.HorovodInternalError, "lost the other ranks"):
    for step in range(1000):
        if step == 100 and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1000), name="work")
with raises(hvd.HorovodInternalError):
    hvd.barrier()
sys.stderr.write("survived\n")
hvd.shutdown()

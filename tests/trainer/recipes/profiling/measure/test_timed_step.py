import time

import numpy as np
import pytest
import torch

from datasvc.trainer.recipes.profiling.measure import timed_step
from datasvc.trainer.recipes.profiling.measure.measure import _host_share, _split_reduce
from datasvc.trainer.recipes.profiling.measure.timed_step import BESIDE, OWN, PARTS, WALL, StepPartTimer

WAIT_S = 0.02
REDUCE = PARTS.index("all-reduce")


@pytest.fixture
def spinning_device(monkeypatch):
    """A device that is waited for as CUDA is: by looking again and again, which takes processor time."""

    def synchronize(_device):
        began = time.thread_time()
        while time.thread_time() - began < WAIT_S:
            pass

    monkeypatch.setattr(timed_step, "synchronize", synchronize)


def test_waiting_for_the_device_is_nobody_s_work(spinning_device):
    timer = StepPartTimer(torch.device("cpu"))
    timer.mark("forward")
    timer.mark("all-reduce")
    forward, reduce = (timer.table[PARTS.index(part)] for part in ("forward", "all-reduce"))
    assert min(forward[WALL], reduce[WALL]) >= WAIT_S
    assert max(forward[OWN], reduce[OWN]) < WAIT_S / 2
    assert max(forward[BESIDE], reduce[BESIDE]) < WAIT_S / 2


def test_all_reduces_of_gpus_are_not_taken_for_launching_them(spinning_device):
    tables = []
    for _rank in range(2):
        timer = StepPartTimer(torch.device("cpu"))
        timer.mark("all-reduce")
        tables.append(timer.table)
    launch_s, reduce_s, _ = _split_reduce(np.stack(tables)[:, None], on_cpu=False)
    assert launch_s < WAIT_S / 2 < reduce_s


def test_a_gpu_s_host_is_disturbed_only_where_it_works():
    table = np.zeros((len(PARTS), 3))
    table[PARTS.index("forward")] = 0.2, 0.05, 0.0
    table[PARTS.index("backward")] = 0.2, 0.05, 0.0
    table[REDUCE] = 5.0, 0.0, 0.0
    assert _host_share(table) == pytest.approx(0.25)
    table[:, OWN] = 2 * table[:, WALL]
    assert _host_share(table) == 1.0

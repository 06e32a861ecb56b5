from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datasvc.testing import FakeClock
from datasvc.trainer.recipes.profiling.measure import profiled_run
from datasvc.trainer.recipes.profiling.measure.measure import _host_share, _split_reduce
from datasvc.trainer.recipes.profiling.measure.profiled_run import OWN, PARTS, WALL, StepPartTimer

REDUCE = PARTS.index("all-reduce")


@pytest.fixture
def clock(monkeypatch):
    """A clock of all times: a device is waited for as CUDA is, by looking for 2 s, which takes processor time."""
    clock = FakeClock()
    times = SimpleNamespace(perf_counter=clock, thread_time=clock, process_time=clock)
    monkeypatch.setattr(profiled_run, "time", times)
    monkeypatch.setattr(profiled_run, "synchronize", lambda _device: clock.advance(2))
    return clock


def test_the_wait_for_the_device_is_counted_as_work_of_no_thread(clock):
    timer = StepPartTimer(torch.device("cpu"))
    clock.advance(1)
    timer.mark("forward")
    timer.mark("all-reduce")
    assert [list(timer.table[PARTS.index(part)]) for part in ("forward", "all-reduce")] == [[3, 1, 0], [2, 0, 0]]


@pytest.mark.usefixtures("clock")
def test_all_reduces_of_gpus_are_not_taken_for_launching_them():
    tables = []
    for _rank in range(2):
        timer = StepPartTimer(torch.device("cpu"))
        timer.mark("all-reduce")
        tables.append(timer.table)
    launch_s, reduce_s, _ = _split_reduce(np.stack(tables)[:, None], on_cpu=False)
    assert (launch_s, reduce_s) == (0, 2)


def test_a_gpu_s_host_is_disturbed_only_where_it_works():
    table = np.zeros((len(PARTS), 3))
    table[PARTS.index("forward")] = 0.2, 0.05, 0.0
    table[PARTS.index("backward")] = 0.2, 0.05, 0.0
    table[REDUCE] = 5.0, 0.0, 0.0
    assert _host_share(table) == pytest.approx(0.25)
    table[:, OWN] = 2 * table[:, WALL]
    assert _host_share(table) == 1.0

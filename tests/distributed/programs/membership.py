"""Joining and leaving: rounds of init and shutdown, departures at different moments, the stall warning."""

import logging
import os
import threading

import torch
import torch.distributed as dist
from checking import raises, run_checks

import trainer as hvd

RANK = int(os.environ["RANK"])


def check_five_rounds():
    for round_number in range(5):
        hvd.init()
        assert hvd.allreduce(torch.tensor([round_number + hvd.rank()]), op=hvd.Sum).item() == 2 * round_number + 1
        hvd.shutdown()
        assert not dist.is_initialized()


def check_a_rank_that_leaves_is_named_to_those_that_wait():
    hvd.init()
    if RANK == 1:
        hvd.shutdown()
        return
    handle = hvd.allreduce_async(torch.ones(1), name="lonely")
    with raises(hvd.HorovodInternalError, "allreduce.lonely", "rank 1 left the job"):
        hvd.synchronize(handle)
    with raises(hvd.HorovodInternalError, "rank 1 left the job"):
        hvd.barrier()
    hvd.shutdown()


def check_what_is_in_flight_at_shutdown_fails():
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(1), name=f"only on rank {RANK}")
    hvd.shutdown()
    with raises(hvd.HorovodInternalError, "left the job"):
        hvd.synchronize(handle)


def check_the_users_own_process_group_is_used_and_kept():
    dist.init_process_group("gloo")
    for _ in range(2):
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
        hvd.shutdown()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2.0
    dist.destroy_process_group()


def check_a_stall_names_the_missing_rank():
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.05"
    warned, messages = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, message):
            messages.append(message.getMessage())
            warned.set()

    logging.getLogger("trainer").addHandler(Listener())
    hvd.init()
    if RANK == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
        assert warned.wait(30.0)
        assert "'allreduce.late' has waited" in messages[0]
        assert "for rank 1, which" in messages[0]
    # Rank 1 submits only after rank 0 has been warned.
    hvd.broadcast(torch.ones(1), 0, name="warned")
    if RANK == 1:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
    assert hvd.synchronize(handle).item() == 1.0
    hvd.shutdown()


run_checks(globals())

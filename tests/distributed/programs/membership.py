"""Joining and leaving: rounds of init and shutdown, departures at different moments, the stall warning."""

import logging
import os
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from checking import raises, run_checks

import datasvc.trainer as hvd
from datasvc.repository import Repository
from datasvc.runs import RunLog, read_run
from datasvc.trainer.recipes.reporting.recorder import Recorder

RANK = int(os.environ["RANK"])


def check_a_rank_that_does_not_come_is_named_and_may_come_later():
    if RANK == 0:
        os.environ["HOROVOD_START_TIMEOUT"] = "0.2"
        with raises(hvd.HorovodInternalError, "rank 1 of 2 did not connect within 0.2 s", "HOROVOD_START_TIMEOUT"):
            hvd.init()
        del os.environ["HOROVOD_START_TIMEOUT"]
        launchers_store().set("rank 0 has given up", "")
    else:
        launchers_store().wait(["rank 0 has given up"])
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    hvd.shutdown()


def launchers_store():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def check_twenty_rounds():
    for round_number in range(20):
        hvd.init()
        assert hvd.allreduce(torch.tensor([round_number + hvd.rank()]), op=hvd.Sum).item() == 2 * round_number + 1
        hvd.shutdown()
        assert not dist.is_initialized()


def check_unnamed_operations_match_after_a_join_however_many_each_rank_made_before():
    hvd.init()
    for _ in range(3 * RANK):
        hvd.allreduce(torch.ones(1))
    assert hvd.join() == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    hvd.shutdown()


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
    warned, messages = threading.Semaphore(0), []

    class Listener(logging.Handler):
        def emit(self, message):
            messages.append(message.getMessage())
            warned.release()

    logging.getLogger("datasvc.trainer").addHandler(Listener())
    repository = Repository.create(tempfile.mkdtemp())
    log = RunLog.open(repository, "hangs")
    hvd.init()
    hvd.allreduce(torch.ones(1), name="late")  # so that later ones are bits
    if RANK == 0:
        recorder = Recorder(torch.device("cpu"), is_on=True)
        recorder.attach(log)
        handle = hvd.allreduce_async(torch.ones(1), name="late")
        assert warned.acquire(timeout=30.0)
        assert "'allreduce.late' has waited" in messages[0]
        assert "for rank 1, which" in messages[0]
        # The engine reports to the log after its warning, so at the second one the log has the first.
        assert warned.acquire(timeout=30.0)
        assert log.flush()
        first = read_run(repository, log.name, log.id).events[0]
        assert (first.event, first.facts["operation"], first.facts["ranks"]) == ("stalled", "'allreduce.late'", [1])
        recorder.close()
    # Rank 1 submits only after rank 0 has been warned.
    hvd.broadcast(torch.ones(1), 0, name="warned")
    if RANK == 1:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
    assert hvd.synchronize(handle).item() == 1.0
    hvd.shutdown()


def check_a_stall_that_lasts_ends_the_job_with_the_reason_on_every_rank():
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.2"
    hvd.init()
    if RANK == 0:
        with raises(hvd.HorovodInternalError, "'allreduce.lonely' has waited", "for rank 1, which", "SHUTDOWN_TIME"):
            hvd.allreduce(torch.ones(1), name="lonely")
    else:
        with raises(hvd.HorovodInternalError, "'allreduce.lonely' has waited"):
            hvd.allreduce(torch.ones(1), name="other")
    hvd.shutdown()
    del os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]


def check_autotuning_continues_while_operations_run():
    log = Path(tempfile.mkdtemp()) / "log.csv"
    os.environ |= {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
    hvd.init()
    is_tried = 0
    while not is_tried:
        handles = [hvd.allreduce_async(torch.ones(50_000), name=f"tuned.{i}", op=hvd.Sum) for i in range(20)]
        assert all(hvd.synchronize(handle)[0].item() == 2.0 for handle in handles)
        lines = log.read_text().splitlines() if RANK == 0 and log.exists() else []
        is_tried = hvd.broadcast(torch.tensor([len(lines) > 1]), 0).item()
    if RANK == 0:
        assert lines[0] == "fusion_bytes,cycle_time_ms,bytes_per_s,hierarchical"
        assert float(lines[1].split(",")[2]) > 0
    hvd.shutdown()
    del os.environ["HOROVOD_AUTOTUNE"], os.environ["HOROVOD_AUTOTUNE_LOG"]


run_checks(globals())

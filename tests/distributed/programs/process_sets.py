"""Process sets, and ranks that run out of data before the others: three ranks or more.

Writes a timeline to argv[1].
"""

import json
import sys
from pathlib import Path

import torch
from checking import raises, run_checks

import datasvc.trainer as hvd

OUTER = hvd.ProcessSet([2, 0])
hvd.init(process_sets=[OUTER])
RANK, SIZE = hvd.rank(), hvd.size()
TRACE = Path(sys.argv[1])


def check_a_set_given_to_init_is_known():
    assert OUTER.process_set_id == 1
    assert OUTER.ranks == [0, 2]
    assert OUTER.size() == 2
    assert OUTER.included() == (RANK in (0, 2))
    assert hvd.global_process_set.ranks == list(range(SIZE))
    assert hvd.process_set_table() == {0: list(range(SIZE)), 1: [0, 2]}
    if RANK == 2:
        assert OUTER.rank() == 1
    if RANK == 1:
        with raises(ValueError, "rank 1 is not in"):
            OUTER.rank()


def check_operations_among_the_ranks_of_a_set():
    if not OUTER.included():
        with raises(ValueError, f"rank {RANK} is not in ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=OUTER)
        return
    assert hvd.allreduce(torch.tensor([float(RANK)]), process_set=OUTER).item() == 1.0
    assert hvd.allgather(torch.tensor([RANK]), process_set=OUTER).tolist() == [0, 2]
    assert hvd.broadcast(torch.tensor([RANK]), 2, process_set=OUTER).item() == 2
    assert hvd.alltoall(torch.tensor([RANK, RANK + 10]), process_set=OUTER).tolist() == (
        [0, 2] if RANK == 0 else [10, 12]
    )
    part = hvd.reducescatter(torch.arange(3) + RANK, op=hvd.Sum, process_set=OUTER)
    assert part.tolist() == ([2, 4] if RANK == 0 else [6])
    hvd.barrier(OUTER)
    with raises(ValueError, "root rank 1 must be one of the ranks"):
        hvd.broadcast(torch.ones(1), 1, process_set=OUTER)
    with raises(ValueError, "not with ProcessSet"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=OUTER)


def check_gradients_in_a_set():
    if OUTER.included():
        x = torch.ones(2, requires_grad=True)
        (hvd.allgather(x, process_set=OUTER) * (RANK + 1)).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0))  # (1 + 3) / 2


def check_one_name_in_two_sets_is_two_operations():
    handles = [hvd.allreduce_async(torch.ones(1), name="same", op=hvd.Sum)]
    if OUTER.included():
        handles.append(hvd.allreduce_async(torch.ones(1), name="same", op=hvd.Sum, process_set=OUTER))
    assert [hvd.synchronize(handle).item() for handle in handles] == [SIZE, 2.0][: len(handles)]


def check_sets_come_and_go_while_the_job_runs():
    first = hvd.add_process_set([1])
    assert first.process_set_id == 2
    with raises(ValueError, "already"):
        hvd.add_process_set([1])
    with raises(ValueError, "already"):
        hvd.add_process_set(list(range(SIZE)))
    with raises(ValueError, "but the ranks of the job are"):
        hvd.add_process_set([0, SIZE])
    if first.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 1.0
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert first.process_set_id is None
    with raises(ValueError, "add_process_set"):
        hvd.allreduce(torch.ones(1), process_set=first)
    with raises(hvd.HorovodInternalError, "ranks disagree on the ranks"):
        hvd.add_process_set([0] if RANK else [1])
    assert hvd.add_process_set(first) is first
    assert hvd.process_set_table() == {0: list(range(SIZE)), 1: [0, 2], 3: [1]}


def check_ranks_that_have_joined_stand_aside():
    # Rank r has data for r steps; the last rank goes on alone.
    for step in range(RANK):
        at_work = [rank for rank in range(SIZE) if rank > step]
        total = hvd.allreduce(torch.tensor([float(RANK)]), op=hvd.Sum)
        assert total.item() == sum(at_work)
        assert hvd.allreduce(torch.full((2,), 6.0)).tolist() == [6.0 * len(at_work) / SIZE] * 2
        assert hvd.allreduce(torch.tensor([RANK + 1.0]), op=hvd.Min).item() == min(at_work) + 1
        assert hvd.allreduce(torch.tensor([-RANK - 1]), op=hvd.Max).item() == -min(at_work) - 1
        assert hvd.allreduce(torch.tensor([2.0]), op=hvd.Product).item() == 2.0 ** len(at_work)
        for op, factor in ((hvd.Min, -2.0), (hvd.Max, 3.0), (hvd.Product, 0.5)):
            scaled = hvd.allreduce(torch.tensor([1.0]), op=op, prescale_factor=factor)
            assert scaled.item() == (factor ** len(at_work) if op is hvd.Product else factor)
        assert hvd.allreduce(torch.tensor([True, False]), op=hvd.Sum).tolist() == [True, False]
        hvd.barrier()
        if step == SIZE - 2:  # the last rank is alone
            with raises(hvd.HorovodInternalError, "joined", "not allgather"):
                hvd.allgather(torch.ones(1))
    travelling = hvd.allreduce_async(torch.ones(2_000_000)) if RANK == SIZE - 1 else None
    assert hvd.join() == SIZE - 1
    # Ranks have used different numbers of names that were made by counting; all count from the beginning again.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    if travelling is not None:
        assert hvd.synchronize(travelling)[0].item() == torch.tensor(1 / SIZE).item()
    assert hvd.allgather(torch.tensor([RANK])).tolist() == list(range(SIZE))


def check_a_timeline_shows_which_rank_submitted_when():
    hvd.start_timeline(str(TRACE), mark_cycles=True)
    hvd.barrier()
    hvd.allreduce(torch.ones(3), name="traced")
    hvd.broadcast(torch.ones(3), 0, name="traced")
    hvd.barrier()
    hvd.stop_timeline()
    assert hvd.allreduce(torch.ones(1)).item() == 1.0, "an operation after the timeline"
    for _ in range(2):  # the second begins while the first is open
        hvd.start_timeline(str(TRACE) + ".twice")
        hvd.allreduce(torch.ones(1), name="again")
    hvd.stop_timeline()
    if RANK == 0:
        assert json.loads(Path(str(TRACE) + ".twice").read_text())
    if RANK == 0:
        events = json.loads(TRACE.read_text())
        rows = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
        row = [event for event in events if event["pid"] == rows["allreduce.traced"] and event["ph"] != "M"]
        phases = [event["name"] for event in row if event["ph"] == "B"]
        assert phases[:2] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"], phases
        assert sorted(event["name"] for event in row if event["ph"] == "X") == [str(rank) for rank in range(SIZE)]
        assert sum(event["ph"] == "B" for event in row) == sum(event["ph"] == "E" for event in row)
        assert "broadcast.traced" in rows
        assert any(event.get("name") == "CYCLE_START" for event in events)


def check_a_file_that_cannot_be_written_is_refused():
    if RANK == 0:
        with raises(ValueError, "cannot be written"):
            hvd.start_timeline("/nowhere/trace.json")


def check_an_end_and_a_new_beginning_forget_the_sets():
    hvd.shutdown()
    assert OUTER.process_set_id is None
    hvd.init(comm=list(range(SIZE)), process_sets="dynamic")
    assert hvd.process_set_table() == {0: list(range(SIZE))}
    assert hvd.add_process_set(OUTER).process_set_id == 1
    hvd.shutdown()
    with raises(ValueError, "use hvd.add_process_set"):
        hvd.init(comm=[0])


run_checks(globals())

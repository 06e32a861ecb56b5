"""Servers and workers over real links, as threads of one process."""

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous import signs_of_life
from datasvc.trainer.servers.coordinator import Coordinator, Gate
from datasvc.trainer.servers.leases import Staleness
from datasvc.trainer.servers.server_link import ServerLink
from datasvc.trainer.servers.shard_server import serve_shard
from datasvc.trainer.servers.worker_client import WorkerClient

LOST_AFTER_S = 1.0
WORKERS, STEPS, SIZE = 3, 50, 12
NAMES = [["a"], ["b"]]
generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(STEPS * SIZE, 4, generator=generator)
TARGETS = torch.randn(STEPS * SIZE, generator=generator)


def make_optimizer(groups):
    return torch.optim.SGD(groups, 0.1, momentum=0.9)


def initial():
    return {"a": torch.linspace(-1, 1, 4), "b": torch.ones(1)}


def sum_loss(weights, rows):
    return ((INPUTS[rows] @ weights["a"] + weights["b"] - TARGETS[rows]) ** 2).sum()


def gradients(weights, rows):
    for weight in weights.values():
        weight.grad = None
        weight.requires_grad_()
    loss = sum_loss(weights, rows)
    loss.backward()
    return loss.item(), [[weights[name].grad] for names in NAMES for name in names]


def rate_at(position):
    return 0.02 if position < SIZE * 20 else 0.01


def train_alone():
    """Synchronous SGD with the whole batch of each step."""
    weights = {name: torch.nn.Parameter(value) for name, value in initial().items()}
    optimizer = make_optimizer(list(weights.values()))
    for step in range(STEPS):
        gradients(weights, slice(step * SIZE, (step + 1) * SIZE))
        for weight in weights.values():
            weight.grad /= SIZE
        optimizer.param_groups[0]["lr"] = rate_at(step * SIZE)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def work(store, worker, lose_at=None, together=None):
    """Compute parts until the end; with `lose_at`, leave after so many, with the gradients pushed to one server.

    With the barrier `together`, the first five grants wait for those of the others, so each worker gets that many.
    """
    with WorkerClient(store, worker=worker, num_servers=2, timeout_s=20, lost_after_s=LOST_AFTER_S) as client:
        weights = initial()
        parts = [[weights[name] for name in names] for names in client.welcome["names"]]
        served = []
        while (grant := client.next_grant()) is not None:
            if together is not None and len(served) <= 4:
                together.wait()
            client.pull([[part.detach() for part in each] for each in parts])
            start = grant.position + grant.part * SIZE // WORKERS
            loss, found = gradients(weights, slice(start, start + SIZE // WORKERS))
            if len(served) == lose_at:
                client._links[0].send_message(op="push", lease=grant.lease)
                client._links[0].send(torch.full((4,), 1e6))
                client._links[0].receive_message()
                return served
            client.push(grant, found, loss=loss, num_targets=SIZE // WORKERS)
            served.append((grant.position, grant.part, tuple(grant.lost)))
        assert client.end == {"epoch": 7}
        return served


def work_late(store, was_dropped):
    """Push the first part only after server 0 has dropped this worker, as if its process was stopped until then."""
    with WorkerClient(store, worker=1, num_servers=2, timeout_s=20, lost_after_s=LOST_AFTER_S) as client:
        grant = client.next_grant()
        look = client._life._look
        client._life._look = lambda: was_dropped.wait() and look()
        was_dropped.wait()
        with pytest.raises(HorovodInternalError, match=r"this worker, rank 3, was dropped: it gave no sign of life"):
            while True:
                client.push(grant, [[torch.full((4,), 1e6)], [torch.full((1,), 1e6)]], loss=1.0, num_targets=4)
                client.next_grant()
    return []


def run(bound, late=None, **lost):
    store, losses, lost_workers = HashStore(), [], []

    def report_lost(worker):
        lost_workers.append(worker)
        was_dropped.set()

    was_dropped = threading.Event()
    shards = [
        {"weights": {name: initial()[name] for name in names}, "moments": {}, "groups": [{"params": names}]}
        for names in NAMES
    ]
    with ThreadPoolExecutor(8) as threads:
        options = {"server": 1, "num_workers": WORKERS, "make_optimizer": make_optimizer, "timeout_s": 20}
        options["lost_after_s"] = LOST_AFTER_S
        other = threads.submit(serve_shard, store, **options)
        together = threading.Barrier(WORKERS) if lost.keys() == {"worker_1_at"} else None
        workers = [
            threads.submit(work_late, store, was_dropped)
            if worker == late
            else threads.submit(work, store, worker, lost.get(f"worker_{worker}_at"), together)
            for worker in range(WORKERS)
        ]
        coordinator = Coordinator(
            store,
            shards,
            make_optimizer,
            num_workers=WORKERS,
            staleness=Staleness(bound),
            welcome={"names": NAMES},
            on_lost=report_lost,
            timeout_s=20,
            lost_after_s=LOST_AFTER_S,
        )
        try:
            for first, num_steps in ((0, 20), (20, STEPS - 20)):
                losses += coordinator.run_steps(Gate(0, first * SIZE, num_steps, SIZE, rate_at))
                states = coordinator.state()
            coordinator.end(epoch=7)
        finally:
            coordinator._others.clear()  # as at the end of the process
        other.result()
        served = [each.result() for each in workers]
    weights = {name: value for state in states for name, value in state["weights"].items()}
    return weights, losses, served, lost_workers, coordinator


def test_with_bound_0_it_is_synchronous_sgd():
    weights, losses, served, _, _ = run(0)
    expected = train_alone()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
    assert len(losses) == STEPS
    assert sum(map(len, served)) == STEPS * WORKERS


@pytest.mark.parametrize("bound", [0, 3, None])
def test_a_lost_worker_leaves_nothing_and_its_part_is_computed_by_another(bound):
    weights, _, served, lost, coordinator = run(bound, worker_1_at=4)
    assert lost == [1]
    parts = [(position, part) for each in served for position, part, _ in each]
    assert sorted(parts) == [(step * SIZE, part) for step in range(STEPS) for part in range(WORKERS)]
    assert [lost for each in served for *_, lost in each if lost] == [(1,)]
    assert bound is None or coordinator.leases.largest_gap <= bound
    if bound == 0:
        torch.testing.assert_close(weights["a"], train_alone()["a"], rtol=0, atol=1e-6)
    final = sum_loss(weights, slice(None)).item()
    assert final < sum_loss(initial(), slice(None)).item() / 2


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, None])
def test_a_silent_worker_is_dropped_and_its_late_push_is_refused(bound, monkeypatch):
    monkeypatch.setattr(signs_of_life, "POLL_S", 0.02)
    weights, _, served, lost, _ = run(bound, late=1)
    assert lost == [1]
    parts = [(position, part) for each in served for position, part, _ in each]
    assert sorted(parts) == [(step * SIZE, part) for step in range(STEPS) for part in range(WORKERS)]
    assert weights["a"].abs().max() < 100
    if bound == 0:
        torch.testing.assert_close(weights["a"], train_alone()["a"], rtol=0, atol=1e-6)


def test_a_rank_that_counts_while_its_main_thread_computes_is_not_silent(monkeypatch):
    monkeypatch.setattr(signs_of_life, "POLL_S", 0.02)
    store, silent, looks = HashStore(), [], threading.Semaphore(0)

    class Looked(signs_of_life.SilenceTimer):
        def look(self, value, now_s):
            looks.release()
            return super().look(value, now_s)

    monkeypatch.setattr(signs_of_life, "SilenceTimer", Looked)
    with (
        signs_of_life.SignsOfLife(store, 1, [], silent.append, lost_after_s=LOST_AFTER_S),
        signs_of_life.SignsOfLife(store, 0, [1, 2], silent.append, lost_after_s=LOST_AFTER_S),
    ):
        for _ in range(int(2 * LOST_AFTER_S / 0.02)):  # rank 2 has not begun: it is not silent either
            looks.acquire()
    assert not silent


class OddStore:
    """A store whose connections ask `use` before each operation."""

    def __init__(self, use):
        self._use, self._store = use, HashStore()

    def clone(self):
        return self

    def __getattr__(self, name):
        self._use()
        return getattr(self._store, name)


def test_a_store_that_does_not_answer_is_the_loss_of_server_0_for_all_others(monkeypatch):
    monkeypatch.setattr(signs_of_life, "POLL_S", 0.02)
    monkeypatch.setattr(signs_of_life, "STORE_FACTOR", 1)
    answers, reported = threading.Event(), queue.Queue()
    with signs_of_life.SignsOfLife(OddStore(answers.wait), 1, [0], reported.put, lost_after_s=0.1):
        assert reported.get(timeout=60) == 0
        answers.set()


def test_a_process_counts_on_after_its_connection_to_the_store_was_lost(monkeypatch):
    monkeypatch.setattr(signs_of_life, "POLL_S", 0.02)
    answers, ever = threading.Semaphore(0), iter([True])

    def use():
        if next(ever, False):
            raise RuntimeError("connection reset")
        answers.release()

    with signs_of_life.SignsOfLife(OddStore(use), 1, [], print, lost_after_s=LOST_AFTER_S) as life:
        for _ in range(4):
            assert answers.acquire(timeout=60)
        assert not life.was_dropped


def test_the_threads_of_a_worker_end_if_it_cannot_connect():
    others = threading.enumerate()
    with pytest.raises(HorovodInternalError, match="did not connect"):
        WorkerClient(HashStore(), worker=0, num_servers=1, timeout_s=0.1, lost_after_s=LOST_AFTER_S)
    for thread in set(threading.enumerate()) - set(others):
        thread.join(60)
        assert not thread.is_alive()


def test_a_run_ends_with_an_error_if_all_workers_are_lost():
    with pytest.raises(HorovodInternalError, match="all workers are lost"):
        run(0, worker_0_at=2, worker_1_at=2, worker_2_at=2)


def test_an_error_of_the_optimizer_ends_the_run():
    class Broken(torch.optim.SGD):
        def step(self):
            raise ValueError("no step")

    def push():
        with contextlib.suppress(HorovodInternalError):
            client = WorkerClient(store, worker=0, num_servers=1, timeout_s=20, lost_after_s=LOST_AFTER_S)
            client.push(client.next_grant(), [[torch.ones(5)]], loss=1.0, num_targets=1)
            client.next_grant()

    store = HashStore()
    threading.Thread(target=push, daemon=True).start()
    shard = {"weights": initial(), "moments": {}, "groups": [{"params": ["a", "b"]}]}
    coordinator = Coordinator(
        store, [shard], Broken, num_workers=1, staleness=Staleness(0), welcome={}, lost_after_s=LOST_AFTER_S
    )
    with pytest.raises(ValueError, match="no step"):
        list(coordinator.run_steps(Gate(0, 0, 1, SIZE, rate_at)))


def test_the_loss_of_a_peer_is_an_error_that_names_it():
    store, ends = HashStore(), {}

    def leave():
        ends["other"] = ServerLink(store, "x", end=1, peer="a worker")

    thread = threading.Thread(target=leave)
    thread.start()
    link = ServerLink(store, "x", end=0, peer="server 4 (rank 4)")
    thread.join()
    del ends["other"]
    with pytest.raises(HorovodInternalError, match=r"server 4 \(rank 4\) is lost"):
        link.receive_message()

"""What jobs with parameter servers, or with replicas that come and go, do with what is lost, late or unequal."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from datasvc.errors import ConfigError
from datasvc.ledger.leases import Leases, plan_shares
from datasvc.models.saving.save_agreement import DueSaves
from datasvc.models.saving.save_policy import SavePolicy, SaveScheduler
from datasvc.planning.layout import Layout
from datasvc.trainer.elastic.driver.actions import Announce
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.recipes.layouts.places import plan_transfers
from datasvc.trainer.recipes.servers.coordinate import _place
from datasvc.trainer.servers.coordinator import Coordinator, Gate
from datasvc.trainer.servers.leases import LeaseTable, Staleness
from datasvc.trainer.servers.worker_client import WorkerClient
from tests.trainer.elastic.driver.test_membership import ReplicaWorld, World
from tests.trainer.recipes.layouts.test_places import NEW, held, pairs
from tests.trainer.recipes.optimizers.test_leased_rounds import Ranks

BOUNDS = pytest.mark.parametrize("bound", [0, 2, None])
STEPS, SIZE, WORKERS = 6, 4, 2


def rate_at(position):
    return 0.1 if position < 3 * SIZE else 0.01


def train(bound, work, num_workers=WORKERS, store=None, before=lambda _: None):
    """Train a weight of 0 on one server, with `work(client)` of each worker in a thread, which calls `before` first.

    Returns the weight, the number of losses, and what the workers returned.
    """
    store, shard = (
        store or HashStore(),
        {"weights": {"w": torch.zeros(3)}, "moments": {}, "groups": [{"params": ["w"]}]},
    )

    def start(worker):
        try:
            before(worker)
            return work(WorkerClient(store, worker=worker, num_servers=1, timeout_s=20, lost_after_s=60))
        except Exception as error:  # without its frames, which would keep the connection
            return repr(error)

    with ThreadPoolExecutor(num_workers) as threads:
        workers = [threads.submit(start, worker) for worker in range(num_workers)]
        coordinator = Coordinator(
            store,
            [shard],
            lambda groups: torch.optim.SGD(groups, 1.0),
            num_workers=num_workers,
            staleness=Staleness(bound),
            welcome={},
            lost_after_s=60,
        )
        losses = list(coordinator.run_steps(Gate(0, 0, STEPS, SIZE, rate_at)))
        weight = coordinator.state()[0]["weights"]["w"]
        coordinator.end(epoch=1)
        return weight, len(losses), [each.result() for each in workers]


def push_ones(client, make=torch.ones):
    """Compute parts whose mean gradient is 1, to the end; return what was pulled first, and the number of parts."""
    mine, first, parts = torch.full((3,), torch.nan), None, 0
    while (grant := client.next_grant()) is not None:
        client.pull([[mine]])
        first, parts = (mine.clone() if first is None else first), parts + 1
        client.push(grant, [[2 * make(3)]], loss=1.0, num_targets=2)
    assert client.end == {"epoch": 1}
    return first, parts


@BOUNDS
def test_rates_go_by_steps_however_many_updates_a_step_has(bound):
    """apache/mxnet#625, #15919: with N workers, a schedule that counts updates falls N times too early, or never.

    tensorflow/tensorflow#24997, sql-machine-learning/elasticdl#1754: the first that had all steps ended the others,
    or some more were made. bytedance/byteps#357: one worker began with other weights.
    """
    weight, num_losses, served = train(bound, push_ones)
    torch.testing.assert_close(weight, torch.full((3,), -(3 * 0.1 + 3 * 0.01)))
    assert (num_losses, sum(parts for _, parts in served)) == (STEPS, STEPS * WORKERS)
    assert all(first.isfinite().all() and (first <= 0).all() for first, parts in served if parts)


def test_sparse_gradients_of_an_embedding_are_pushed_as_what_they_are():
    """bytedance/byteps#139, #168: sparse gradients were not supported; here every worker failed in its first step."""
    weight, _, _ = train(0, lambda client: push_ones(client, lambda size: torch.ones(size).to_sparse()))
    torch.testing.assert_close(weight, torch.full((3,), -0.33))


def test_weights_that_servers_cannot_hold_are_refused_at_the_start():
    """apache/mxnet#10183, hwang595/ps_pytorch#2: servers and workers took weights of another type for float32."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2).bfloat16(), "b": torch.nn.Linear(2, 2).double()})
    with pytest.raises(ConfigError, match=r"the weight b.weight is torch.float64, and parameter servers hold"):
        _place(model, 2)
    model["b"].requires_grad_(False)
    assert sorted(name for part in _place(model, 2) for name in part) == ["a.bias", "a.weight"]


def test_a_worker_does_not_wait_for_ever_for_a_server_that_never_comes():
    """sql-machine-learning/elasticdl#1814: a worker waited without a limit for the channel to a server."""
    with pytest.raises(HorovodInternalError, match=r"server 0 \(rank 0\) did not connect"):
        WorkerClient(HashStore(), worker=0, num_servers=1, timeout_s=0.01, lost_after_s=60)


@BOUNDS
def test_the_last_part_of_a_lost_worker_is_done_by_one_that_had_nothing_left(bound):
    """sql-machine-learning/elasticdl#897, DeepRec-AI/HybridBackend#96: the others had no task, and waited."""
    table = LeaseTable(2, bound)
    table.open(1)
    lost, done = table.grant(0), table.grant(1)
    table.commit(1, done.number)
    assert table.grant(1) is None
    table.lose(0)
    last = table.grant(1)
    assert (last.number, last.lost) == (lost.number, (0,))
    table.commit(1, last.number)
    assert table.is_drained
    assert table.num_done == 1


def test_a_worker_that_comes_late_begins_where_the_others_are():
    """snuspl/cruise#748, #753: its clock began at 0, so the others, ahead by more than the bound, waited for it."""
    table = LeaseTable(3, 1)
    table.open(20)
    for _ in range(15):
        leases = [table.grant(worker) for worker in range(2)]
        assert None not in leases
        for worker, lease in enumerate(leases):
            table.commit(worker, lease.number)
    assert table.grant(2).step == table.num_done == 10
    assert table.grant(0).step == 10


def test_a_replica_that_returns_takes_all_of_its_parts_from_one_replica():
    """meta-pytorch/torchft#343, #347: ranks of a recovering replica got state of different sources, and hung.

    One of its two ranks has lost nothing; its moments do not fit to those of the other replica.
    """
    plan = plan_transfers(held((0, 0), (0, 1), (1, 0), None), pairs(2))
    assert (plan.sources, plan.keeps_moments) == ((0, 1, 0, 1), True)
    # A rank has committed one step more than all that are left: no rank has the other part of it.
    ahead = held((0, 0), commit=(1, 12, False))[0]
    assert plan_transfers([(*ahead, *held((0, 0))[0]), *held((0, 1))], pairs(1)).commit == NEW


def test_positions_and_global_batch_stay_when_replicas_are_lost_and_come_back():
    """meta-pytorch/torchft#292: two of three replicas skipped the samples of the third, in smaller global batches."""
    position, sizes = 0, []
    for shares in [(2, 2, 2), (3, 1), (2,), (1, 4, 1), (2, 2, 2)]:
        found = Leases(2, shares).next_round(position, 120, 12 // len(shares), len(shares))
        batches = [found.batch_of(rank, number) for rank in range(len(shares)) for number in range(shares[rank])]
        assert [each for batch in batches for each in batch] == list(range(position, position + 24))
        position = found.stop
        sizes.append(sum(map(len, batches)) // 2)
    assert (position, set(sizes)) == (120, {12})


def test_a_replica_that_is_alone_counts_whole_and_an_unmeasurably_fast_one_leaves_one_batch_to_each(monkeypatch):
    """learning-at-home/hivemind#447, #440: the only peer had no average, so its steps had gradients of zero."""
    alone = Ranks(monkeypatch, Layout(data=1))
    monkeypatch.setattr("datasvc.trainer.allgather", lambda row, name: row)
    alone.make_round(step_s=2.0, others=[])
    assert alone.ended == [{"weight": 1.0, "num_steps": 7}]
    assert plan_shares(21, [28 / 1e-9, 1e-3, 1e-300]) == (19, 1, 1)


def test_survivors_and_joiners_of_a_round_agree_on_a_sync_and_on_who_sends():
    """horovod/horovod#3494: after a removal below the minimum, survivors skipped the sync that the new ranks began.

    ray-project/ray#60820, intelligent-machine-learning/dlrover#450: the job ended with rank 0.
    """
    world = ReplicaWorld(min_num_ranks=6, hosts_can_change=True)
    world.end("a:0:0")
    world.ask(*(f"a:{slot}:{slot}" for slot in range(1, 6)), serial=3, wants_sync=False)
    assert len(world.ranks()) == 6  # the round before: five are not enough
    world.hosts(a=6, b=1)
    world.come("b:0:6")
    world.ask("b:0:6", wants_sync=False)
    ranks = world.ranks()
    assert "b:0:6" in ranks[1:]
    assert "a:0:0" not in ranks
    assert all(world.seats[worker].needs_sync for worker in ranks)


def test_a_worker_that_ends_after_its_request_and_before_the_round_is_not_waited_for():
    """NVIDIA/nvidia-resiliency-ext#263: one ended after its arrival, and the host of the store waited.

    pytorch/pytorch#111646: the end of a member began no other round.
    """
    world = ReplicaWorld()
    world.ask(*(f"a:{slot}:{slot}" for slot in range(5)), serial=3)
    world.end("a:1:1")
    world.end("a:5:5")
    assert world.ranks() == ["a:2:2", "a:3:3", "a:0:0", "a:4:4"]
    assert not any(isinstance(action, Announce) for action in world.last)


@pytest.mark.parametrize("bound", [0, None])
def test_workers_begin_without_one_that_starts_late_and_takes_part_then(bound):
    """dmlc/parameter_server#17: no worker began before all were there."""
    has_begun, has_joined = threading.Event(), threading.Event()

    def work(client):
        num_parts = 0
        while (grant := client.next_grant()) is not None:
            num_parts += 1
            if client._rank == 2:
                has_joined.set()
            elif num_parts == 3:
                has_begun.set()
                has_joined.wait()
            client.push(grant, [[torch.ones(3)]], loss=1.0, num_targets=1)
        return num_parts

    _, num_losses, parts = train(bound, work, before=lambda worker: worker and has_begun.wait())
    assert num_losses == STEPS
    assert sum(parts) == STEPS * WORKERS
    assert min(parts) >= 1


def test_a_worker_that_was_lost_and_is_started_again_gets_an_error():
    """apache/mxnet#2671: a worker that was started again waited, because the job counted it as present."""
    store, has_first = HashStore(), threading.Event()

    def work(client):
        if client._rank == 2:
            client.next_grant()
            client.__exit__()
            has_first.wait()
            with pytest.raises(HorovodInternalError, match=r"server 0 \(rank 0\) did not connect"):
                WorkerClient(store, worker=1, num_servers=1, timeout_s=20, lost_after_s=60)
            return "refused"
        grant = client.next_grant()
        while grant is not None:
            client.push(grant, [[torch.ones(3)]], loss=1.0, num_targets=1)
            grant = client.next_grant()
            has_first.set()
        return None

    _, num_losses, (_, end) = train(None, work, store=store)
    assert (num_losses, end) == (STEPS, "refused")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saves_are_due_again_in_the_steps_that_a_run_repeats(num_ranks):
    """AI-Hypercomputer/maxtext#5260: a save was lost, and none was due up to its step after the run had gone back."""
    channel = SimpleNamespace(size=num_ranks, exchange=lambda answer: [answer] * num_ranks)
    due = DueSaves(channel, SaveScheduler(SavePolicy(every_steps=20)), None, needs_clock=False)
    steps = [*range(1, 26), *range(20, 45)]
    assert [step for step in steps if due.decide(step, is_saving=False, if_idle=False)] == [20, 20, 40]


def test_workers_that_were_killed_are_neither_counted_nor_waited_for():
    """meta-pytorch/torchft#63: who was killed before the first quorum was a member of it; #35: a loss cost a timeout.

    intelligent-machine-learning/dlrover#1087, #1357: the job waited for workers that had ended, and a new one had the
    state of the one that it replaced. horovod/horovod#3014, #3264: a worker failed during the look-up of hosts, and
    all ended with those of one host.
    """
    world = World(first_num_ranks=3, hosts_can_change=True)
    world.hosts(a=2, b=1)
    world.ask("a:0:0", "b:0:2")
    world.end("b:0:2")
    world.ask("a:1:1")
    assert not world.seats
    world.hosts(a=2, b=1, c=1)
    world.come("c:0:3")
    world.ask("c:0:3")
    assert world.ranks() == ["a:0:0", "a:1:1", "c:0:3"]
    world.end("a:0:0")
    world.ask("c:0:3", serial=4)
    world.hosts(a=2, b=1, c=1)
    world.end("a:1:1")
    assert world.ranks() == ["c:0:3"]
    assert (world.now_s, world.finish) == (0.0, None)

"""The end of a round without a replica that was lost in it: what the other ranks count, and how much each weighs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datasvc.ledger.broken_rounds import RoundPart
from datasvc.order import OrderConfig
from datasvc.planning.layout import Layout
from datasvc.trainer.optim.sync_policy import parse_sync
from datasvc.trainer.recipes.optimizers import catch_up
from datasvc.trainer.recipes.optimizers.catch_up import CatchUp, RoundCopy, begin_catch_up, find_round

# A round of two global batches of 6 samples from position 12 on, of three ranks: the first had a step, the last two.
PART = RoundPart(0, 12, 2, 6, 3, np.empty(0, np.int64))
PARTS = [PART.with_steps(1, [0]), PART.with_steps(2, [2])]


@pytest.fixture
def calls(monkeypatch):
    """What rank 1 of the two that are left asks for, by name; its loss is 2.0 in each step, that of the other 4.0."""
    calls = {}

    def note(name):
        return lambda *values, **options: calls.setdefault(name, (*values, options))

    engine = SimpleNamespace(check=lambda: None)
    monkeypatch.setattr(catch_up.runtime, "current_job", lambda: SimpleNamespace(engine=engine))
    monkeypatch.setattr(catch_up.hvd, "rank", lambda: 1)
    monkeypatch.setattr(
        catch_up.hvd, "allgather", lambda row, name: torch.cat([torch.tensor([[4.0, 1]], device="cpu"), row])
    )
    monkeypatch.setattr(catch_up, "allgather_object", lambda _own, name: PARTS)
    optimizer = SimpleNamespace(
        num_steps=4, **{name: note(name) for name in ("lease_rounds", "end_round", "end_leases")}
    )
    run = SimpleNamespace(
        layout=Layout(data=2),
        batches=SimpleNamespace(batch_size=3),
        step=7,
        device=torch.device("cpu"),
        optimizer=optimizer,
        loader=SimpleNamespace(read_rest=note("read_rest")),
        reading=SimpleNamespace(end_broken_round=note("end_broken_round")),
    )
    return calls, run


def test_a_replica_weighs_as_many_samples_as_it_has_applied_of_the_round(calls):
    calls, run = calls
    rest = begin_catch_up(run, PARTS[1])
    assert isinstance(rest, CatchUp)
    assert (rest.start_step, rest.step, rest.num_applied) == (7, 9, 6)
    read = calls["read_rest"][0]
    assert (read.carried.tolist(), [batch.tolist() for batch in read.batches]) == ([16, 17, 22, 23], [[19, 20, 21]])
    assert rest.end_step(torch.tensor(2.0, device="cpu"), 3) == pytest.approx(3.0)
    # Of the 12 samples this replica has had 4 and 3, in two replicas.
    assert calls["end_round"] == ({"weight": pytest.approx(7 / 12 * 2), "num_steps": 2},)
    assert calls["end_broken_round"] == ({"step": 9, "global_batch": 6, "ranks": 3},)
    assert "end_leases" in calls
    assert calls["lease_rounds"] == ({"is_averaged": False},)


def test_a_copy_in_the_rest_of_a_round_has_what_was_applied_before_and_since(calls):
    _, run = calls
    run.batches.batch_size = 1
    rest = begin_catch_up(run, PARTS[1])
    assert rest.end_step(torch.tensor(2.0, device="cpu"), 1) is None
    copy = rest.copy()
    assert (copy.part.applied.tolist(), copy.step, copy.num_steps) == ([16, 17, 19, 22, 23], 7, 4)


@pytest.mark.parametrize(
    ("num_positions", "max_steps", "goes_on"), [(24, None, True), (29, 9, True), (23, None, False), (24, 8, False)]
)
def test_a_round_goes_on_unless_the_end_of_an_epoch_or_of_the_run_cuts_it(calls, num_positions, max_steps, goes_on):
    """The second step of two is lost, those from step 7 and position 12 on."""
    _, run = calls
    run.rounds, run.is_updating, run.first_round_step, run.step = None, False, 0, 8
    run.optimizer.sync_policy, run.optimizer.num_steps = parse_sync("local:2"), 5
    run.loader.cursor, run.loader.order = (0, 18), OrderConfig(1)
    run.loader.split = SimpleNamespace(num_positions=num_positions)
    run.batches.global_batch, run.config = 6, SimpleNamespace(max_steps=max_steps)
    found = find_round(run)
    assert (None if found is None else (found.step, found.num_steps, found.part.applied.tolist())) == (
        (7, 4, [15, 16, 17]) if goes_on else None
    )


def test_without_a_step_in_the_round_it_is_an_ordinary_one(calls, monkeypatch):
    _, run = calls
    monkeypatch.setattr(catch_up, "allgather_object", lambda _own, name: [PART, PART])
    assert begin_catch_up(run, PART) is None


def test_a_copy_counts_from_the_start_of_its_round_and_sends_nothing_again():
    optimizer = {
        "state": {},
        "averaging": {"sync": "diloco:2", "num_steps": 6, "outer": {"changes": {0: 1}, "rank": 1}},
    }
    averaging = RoundCopy(PART, 7, 4).rewind(optimizer)["averaging"]
    assert (averaging["num_steps"], averaging["outer"]) == (4, {"changes": {}, "rank": 1})

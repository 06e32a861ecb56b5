"""The ends of rounds with leases on rank 0 of three, with a clock, ranks and a loader that the test moves."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

import datasvc.trainer.recipes.optimizers.leased_rounds as module
from datasvc.loaders.core.leased_rounds import RoundQueue
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.planning.layout import Layout
from datasvc.trainer.optim.sync_policy import parse_sync


class Ranks:
    """Rank 0 of a layout; `others`: of the ranks after it in each round, the seconds, samples, losses and steps."""

    def __init__(self, monkeypatch, layout, *, is_measured=True, num_samples=840, batch_size=4):
        self.now_s, self.others, self.ended = 1000.0, deque(), []
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(module.hvd, "rank", lambda: 0)
        monkeypatch.setattr(module.hvd, "allgather", lambda row, name: torch.cat([row, self.others.popleft()]))
        self.queue = RoundQueue(num_samples, batch_size, DataRanks(0, layout.num_data_ranks), "drop", max_steps=7)
        self.batch_size = batch_size
        self.rounds = module.LeasedRounds(
            SimpleNamespace(num_steps=0, lease_rounds=lambda **_: None, end_round=self._end_round),
            SimpleNamespace(read_in_rounds=lambda max_steps: self.queue),
            SimpleNamespace(switch_leases=lambda leases, step: None),
            layout=layout, policy=parse_sync("local:7"), is_measured=is_measured, step=0, max_steps=None,
            device=torch.device("cpu"), saved={},
        )  # fmt: skip

    def _end_round(self, **end):
        self.ended.append(end)

    def make_round(self, *, step_s, others):
        """Make the steps of rank 0; the first batch comes late, and the others are waited for after the round."""
        shares, loss = self.rounds._known[0][0].shares, None
        self.others.append(torch.tensor(others, dtype=torch.float64))
        self.now_s += 50.0
        for number in range(shares[0]):
            self.rounds.got_batch()
            self.now_s += step_s
            self.queue.hand_over()
            loss = self.rounds.end_step(torch.tensor(float(number)), self.batch_size)
            assert (loss is None) == (number < shares[0] - 1)
        return shares, loss


def test_shares_follow_the_time_from_the_first_batch_to_the_last_step(monkeypatch):
    ranks = Ranks(monkeypatch, Layout(data=3))
    # A step of rank 0 takes 2 s, of the others 4 s and 1 s: 28 samples in 14, 28 and 7 s.
    equal = [[28.0, 28, 7.0, 7], [7.0, 28, 14.0, 7]]
    shares, loss = ranks.make_round(step_s=2.0, others=equal)
    assert shares == (7, 7, 7)
    assert float(loss) == pytest.approx((sum(range(7)) + 7 + 14) / 21)
    assert ranks.make_round(step_s=2.0, others=equal)[0] == (7, 7, 7)
    shares, loss = ranks.make_round(step_s=2.0, others=[[12.0, 12, 30.0, 3], [12.0, 48, 12.0, 12]])
    assert shares == (6, 3, 12)
    assert float(loss) == pytest.approx((sum(range(6)) + 30 + 12) / 21)  # of all steps, not of ranks
    assert [end["weight"] for end in ranks.ended] == pytest.approx([1, 1, 24 * 3 / 84])
    assert {end["num_steps"] for end in ranks.ended} == {7}
    assert (ranks.rounds.start_step, ranks.rounds.step) == (14, 26)
    assert ranks.rounds.samples_per_step == pytest.approx(84 / 6)
    assert ranks.rounds.state_dict() == {"planned": [[6, 3, 12]] * 2}


def test_a_replica_has_the_samples_of_its_data_ranks_and_the_time_of_its_slowest(monkeypatch):
    # Ranks 0 to 3 are replica 0: two data ranks, of two parts of the model each.
    ranks = Ranks(monkeypatch, Layout(replica=2, data=2, tensor=2))
    # 28 samples of each of two data ranks: in 28 s, because of rank 3, and in 7 s.
    others = [[14.0, 28, 0.0, 7]] * 2 + [[28.0, 28, 0.0, 7]] + [[7.0, 28, 0.0, 7]] * 4
    for _ in range(2):
        assert ranks.make_round(step_s=2.0, others=others)[0] == (7, 7)
    assert ranks.rounds._known[0][0].shares == (3, 11)
    assert ranks.ended[0] == {"weight": 1.0, "num_steps": 7}


def test_equal_leases_stay_equal_at_any_speed(monkeypatch):
    ranks = Ranks(monkeypatch, Layout(data=3), is_measured=False)
    for _ in range(4):
        assert ranks.make_round(step_s=9.0, others=[[7.0, 28, 7.0, 7]] * 2)[0] == (7, 7, 7)

"""Pairs and rates of tournaments as pure functions; rounds of several ranks: `distributed/programs/averaging.py`."""

from collections import Counter
from itertools import combinations

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.trainer.optim.tournament import change_exponent, first_exponent, pair_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 16])
def test_each_rank_is_in_one_pair_and_all_pairs_are_equally_likely(num_ranks):
    num_rounds, counts = 4000, Counter()
    for number in range(num_rounds):
        pairs = pair_ranks(0, number, num_ranks)
        ranks = [rank for pair in pairs for rank in pair]
        assert len(pairs) == num_ranks // 2
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(num_ranks))
        counts.update(map(frozenset, pairs))
    possible = [*map(frozenset, combinations(range(num_ranks), 2))]
    assert set(counts) <= set(possible)
    if len(possible) > 1:
        expected = num_rounds * (num_ranks // 2) / len(possible)
        chi_square = sum((counts[pair] - expected) ** 2 / expected for pair in possible)
        freedom = len(possible) - 1
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_pairs_follow_from_seed_and_round():
    drawn = [pair_ranks(seed, number, 16) for seed in (0, 1) for number in (0, 1)]
    assert drawn == [pair_ranks(seed, number, 16) for seed in (0, 1) for number in (0, 1)]
    assert len({*map(str, drawn)}) == 4


def test_factors_begin_at_three_values_and_change_up_or_down_equally_often():
    first = Counter(first_exponent(7, rank) for rank in range(3000))
    changes = Counter(change_exponent(7, number, rank) for number in range(100) for rank in range(30))
    assert set(first) == {-1, 0, 1}
    assert set(changes) == {-1, 1}
    assert all(900 < count < 1100 for count in first.values())
    assert all(1400 < count < 1600 for count in changes.values())


@pytest.fixture
def one_rank():
    hvd.init()
    yield
    hvd.shutdown()


def make_optimizer(sync="tournament:2:perturb=1.5"):
    return hvd.Averaging(
        torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1), sync, judge=lambda: 1.0, seed=1
    )


def test_a_state_has_the_last_hundred_rounds_and_the_factor_of_its_rank_only(one_rank):
    saving, same, other = make_optimizer(), make_optimizer(), make_optimizer()
    for _ in range(301):
        saving.step()
    state = saving.state_dict()
    tournament = {**state["averaging"]["tournament"], "exponent": 5}
    same.load_state_dict({**state, "averaging": {**state["averaging"], "tournament": tournament}})
    assert same.tournament.factor == 1.5**5
    assert [played["round"] for played in same.tournament.rounds] == list(range(50, 150))
    moved = {**state["averaging"], "tournament": {**tournament, "size": 2}}
    other.load_state_dict({**state, "averaging": moved})
    assert other.tournament.factor == 1.5 ** first_exponent(1, 0)
    assert other.tournament.rounds == same.tournament.rounds
    other.load_state_dict({name: value for name, value in state.items() if name != "averaging"})
    assert not other.tournament.rounds


def test_a_rate_is_multiplied_in_the_step_only_also_if_that_fails(one_rank):
    optimizer = make_optimizer()
    optimizer.tournament.load_state_dict({"rank": 0, "size": 1, "exponent": 2, "rounds": []})
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1 - 0.1 * 1.5**2))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert optimizer.param_groups[0]["lr"] == 0.1

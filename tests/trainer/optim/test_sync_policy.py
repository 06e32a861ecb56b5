"""When rounds are due, as pure functions; `distributed/programs/averaging.py` makes them."""

import numpy as np
import pytest

from datasvc.trainer.optim.sync_policy import cut_fragments, neighbours, parse_sync


def rounds(text, steps=16):
    policy = parse_sync(text)
    return [step for step in range(1, steps + 1) if policy.is_round(step)]


def test_rounds_are_every_few_steps_and_in_each_step_of_a_warm_up():
    assert rounds("local:8") == [8, 16]
    assert rounds("local:1") == list(range(1, 17))
    assert rounds("postlocal:3:5") == [1, 2, 3, 8, 13]
    assert rounds("diloco:4") == rounds("easgd:4:0.9") == rounds("gossip:ring:4") == [4, 8, 12, 16]
    assert rounds("gossip:exponential") == list(range(1, 17))
    assert rounds("gossip:ring:8:fragments=2") == [4, 8, 12, 16]
    assert rounds("tournament:8:samples=9,perturb=1.2") == [8, 16]


@pytest.mark.parametrize("text", ["local:4", "postlocal:5:3", "diloco:1"])
def test_a_step_is_in_the_round_that_ends_next(text):
    policy = parse_sync(text)
    ends = [0, *(step for step in range(1, 40) if policy.is_round(step))]
    for done in range(30):
        steps = policy.round_at(done)
        assert (steps.start, steps.stop) == (max(e for e in ends if e <= done), min(e for e in ends if e > done))


def test_a_round_of_a_node_is_no_round_of_all_ranks():
    policy = parse_sync("hierarchical:2,8")
    assert [step for step in range(1, 17) if policy.is_round(step)] == [8, 16]
    assert [step for step in range(1, 17) if policy.is_node_round(step)] == [2, 4, 6, 10, 12, 14]
    assert not any(parse_sync("local:2").is_node_round(step) for step in range(9))


@pytest.mark.parametrize(
    "text",
    ["", "bsp", "local", "local:", "local:0", "local:-1", "local:2:3", "local:x", "postlocal:8", "postlocal:-1:8",
     "hierarchical:8", "hierarchical:3,8", "hierarchical:0,8", "easgd:8", "easgd:8:0", "easgd:8:1", "easgd:8:nan",
     "diloco", "diloco:0", "diloco:4:", "diloco:4:2", "diloco:4:delay=1:alpha=1", "diloco:4:delays=1",
     "diloco:4:delay=1,delay=1", "diloco:4:fragments=3", "diloco:4:fragments=0", "diloco:4:delay=4",
     "diloco:4:delay=-1", "diloco:4:fragments=2,delay=2", "diloco:4:alpha=1.1", "diloco:4:alpha=nan",
     "diloco:4:codec=signsgd", "diloco:4:codec=", "gossip", "gossip:star", "gossip:ring:0", "gossip:ring:1:1",
     "gossip:ring:4:fragments=3", "gossip:ring:fragments=4", "gossip:ring:4:delay=1",
     "tournament", "tournament:0", "tournament:8:256", "tournament:8:samples=0", "tournament:8:perturb=0.9",
     "tournament:8:perturb=inf", "tournament:8:codec=int8", "tournament:8:samples=1:perturb=2"],
)  # fmt: skip
def test_another_form_is_refused_with_those_that_there_are(text):
    with pytest.raises(ValueError, match=r"sync is .*; expected local:STEPS, .*gossip:exponential.*tournament:STEPS"):
        parse_sync(text)


def test_a_tournament_has_a_number_of_samples_and_no_perturbation_unless_given():
    policy, given = parse_sync("tournament:8"), parse_sync("tournament:8:perturb=1.2,samples=9")
    assert (policy.samples, policy.perturb, given.samples, given.perturb) == (256, 1.0, 9, 1.2)
    assert not policy.gives_equal_weights


def test_fragments_take_turns_and_each_has_a_round_once_in_its_steps():
    policy = parse_sync("diloco:12:fragments=3,delay=2,alpha=0.5,codec=int4")
    assert (policy.fragments, policy.delay, policy.alpha, policy.codec) == (3, 2, 0.5, "int4")
    ends = [step for step in range(1, 25) if policy.is_round(step)]
    assert ends == [4, 8, 12, 16, 20, 24]
    starts = [step for step in range(1, 25) if policy.starts_round(step)]
    assert starts == [2, 6, 10, 14, 18, 22]
    assert [policy.last_round(step) for step in starts] == [0, 1, 2, 3, 4, 5]
    # A state from between start and end continues the same round.
    assert [policy.last_round(step) for step in range(6, 10)] == [1] * 4
    assert not policy.gives_equal_weights
    assert parse_sync("diloco:12:delay=2").gives_equal_weights


def test_fragments_cover_all_parameters_once_in_order_and_are_balanced():
    for sizes in ([1], [5, 1, 1, 1], [1, 1, 1, 100], [100, 1, 1], list(range(1, 40)), [7] * 12):
        for num_fragments in range(1, len(sizes) + 1):
            fragments = cut_fragments(sizes, num_fragments)
            assert [position for fragment in fragments for position in fragment] == list(range(len(sizes)))
            elements = [sum(sizes[position] for position in fragment) for fragment in fragments]
            assert len(elements) == num_fragments
            assert all(fragments)
            assert max(elements) <= sum(sizes) / num_fragments + max(sizes)
    assert cut_fragments([7] * 12, 4) == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    with pytest.raises(ValueError, match="2 trainable parameters cannot have 3 fragments; use fewer"):
        cut_fragments([1, 1], 3)


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
def test_every_mean_keeps_the_mean_of_all_ranks_and_they_come_together(graph, num_ranks):
    weights, product = np.eye(num_ranks), np.eye(num_ranks)
    for round_number in range(40):
        weights = np.eye(num_ranks)
        for rank in range(num_ranks):
            weights[neighbours(graph, num_ranks, rank, round_number), rank] = 1
        weights /= weights.sum(1, keepdims=True)
        np.testing.assert_allclose(weights.sum(0), 1)
        product = weights @ product
    np.testing.assert_allclose(product, 1 / num_ranks, atol=0.01)

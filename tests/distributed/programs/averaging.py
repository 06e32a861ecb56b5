"""Weights that ranks average every few steps, beside torch's averagers and formulas that are written out."""

import copy
import json
import sys
from unittest import mock

import torch
import torch.distributed as dist
from checking import counting, raises, run_checks
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

import datasvc.trainer as hvd
from datasvc.trainer.gradients import quantized
from datasvc.trainer.optim.sync_policy import neighbours
from datasvc.trainer.optim.tournament import change_exponent, first_exponent

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, number, rank=RANK):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number * 100 + rank))
    optimizer.zero_grad()
    (model(x) - x[:, :2].cumsum(1)).square().mean().backward()
    optimizer.step()


def weights_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def of_all_ranks(model):
    return torch.stack(hvd.allgather_object(weights_of(model)))


def set_weights(model, weights):
    torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())  # parameters are views of it


def check_rounds_of_one_step_are_data_parallel_training():
    model, reference = new_model(), new_model()
    averaging = hvd.Averaging(sgd(model), "local:1")
    gradients = hvd.DistributedOptimizer(sgd(reference), reference.named_parameters())
    for number in range(50):
        step(model, averaging, number)
        step(reference, gradients, number)
        assert averaging.is_averaged
    torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=1e-6)


def check_four_local_steps_are_those_of_torch_to_the_last_bit():
    model, reference = new_model(), new_model()
    averaging, plain = hvd.Averaging(sgd(model), "local:4"), sgd(reference)
    assert dist.is_initialized()
    # Torch counts its steps from 0, and averages in step 0 without this warm-up.
    torchs = PeriodicModelAverager(period=4, warmup_steps=3)
    for number in range(1, 14):
        step(model, averaging, number)
        step(reference, plain, number)
        torchs.average_parameters(reference.parameters())
        assert torch.equal(weights_of(model), weights_of(reference)), number
        assert averaging.is_averaged == (number % 4 == 0)
    assert not torch.equal(*of_all_ranks(model)[:2])


def check_a_rank_that_joins_gets_the_round_of_rank_0():
    model = new_model()
    averaging = hvd.Averaging(sgd(model), "diloco:4")
    for number in range(1, 5):
        step(model, averaging, number)
    if RANK:  # as in a new process
        averaging.load_state_dict({**averaging.state_dict(), "averaging": {"num_steps": 0, "outer": None}})
        set_weights(model, torch.zeros(len(weights_of(model))))
    hvd.elastic.TorchState(model, averaging).synchronize()
    for number in range(5, 9):
        step(model, averaging, number)
    assert averaging.num_steps == 8
    assert averaging.is_averaged
    assert torch.equal(*of_all_ranks(model)[:2])


def check_a_broadcast_in_the_middle_of_a_round_begins_the_round_again_on_all_ranks():
    model = new_model()
    averaging = hvd.Averaging(sgd(model), "diloco:4:delay=3,codec=int8")
    for number in (1, 2):  # the round starts after step 1
        step(model, averaging, number)
    hvd.elastic.TorchState(model, averaging).synchronize()
    for number in range(3, 9):
        step(model, averaging, number)
    assert averaging.is_averaged
    assert torch.equal(*of_all_ranks(model)[:2])


def check_ranks_of_a_node_average_more_often():
    model, reference, same = new_model(), new_model(), new_model()
    averaging, plain, same_plain = hvd.Averaging(sgd(model), "hierarchical:2,4"), sgd(reference), sgd(same)
    torchs = HierarchicalModelAverager({2: 2, 4: 4}) if (SIZE, hvd.cross_size()) == (4, 2) else None
    nodes = hvd.allgather_object(hvd.cross_rank())
    mine = [rank for rank, node in enumerate(nodes) if node == hvd.cross_rank()]
    for number in range(1, 9):
        step(model, averaging, number)
        step(reference, plain, number)
        if number % 2 == 0:
            set_weights(reference, of_all_ranks(reference)[mine if number % 4 else slice(None)].mean(0))
        else:
            of_all_ranks(reference)
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=1e-6)
        if torchs is not None:
            step(same, same_plain, number)
            torchs.step = number  # torch counts its steps from 0
            torchs.average_parameters(same.parameters())
            assert torch.equal(weights_of(model), weights_of(same)), number


def check_elastic_averaging_pulls_ranks_and_center_towards_each_other():
    model, reference = new_model(), new_model()
    averaging, plain, center = hvd.Averaging(sgd(model), "easgd:3:0.9"), sgd(reference), weights_of(reference)
    for number in range(1, 10):
        step(model, averaging, number)
        step(reference, plain, number)
        everyone = of_all_ranks(reference)
        if number % 3 == 0:
            set_weights(reference, everyone[RANK] - 0.9 / SIZE * (everyone[RANK] - center))
            center = 0.1 * center + 0.9 * everyone.mean(0)
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=1e-6)
        assert not averaging.is_averaged


def check_the_mean_change_of_a_round_is_the_gradient_of_diloco():
    model, reference = new_model(), new_model()
    averaging, plain, outer = hvd.Averaging(sgd(model), "diloco:3"), sgd(reference), weights_of(reference)
    velocity = torch.zeros_like(outer)
    for number in range(1, 13):
        step(model, averaging, number)
        step(reference, plain, number)
        everyone = of_all_ranks(reference)
        if number % 3 == 0:
            gradient = (outer - everyone).mean(0)
            velocity = 0.9 * velocity + gradient
            outer = outer - 0.7 * (gradient + 0.9 * velocity)
            set_weights(reference, outer)
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=2e-6)


def check_rounds_with_leases_are_those_of_one_process_that_simulates_all_ranks():
    shares = [3 + 2 * rank for rank in range(SIZE)]
    for sync in ("local:4", "diloco:4"):
        model, simulated = new_model(), [new_model() for _ in range(SIZE)]
        averaging, plain = hvd.Averaging(sgd(model), sync), [sgd(each) for each in simulated]
        averaging.lease_rounds()
        outer = weights_of(model)
        velocity = torch.zeros_like(outer)
        for number in (0, 100, 200):
            for rank, (each, optimizer) in enumerate(zip(simulated, plain, strict=True)):
                for own in range(shares[rank]):
                    step(each, optimizer, number + own, rank)
            for own in range(shares[RANK]):
                step(model, averaging, number + own)
                assert not averaging.is_averaged
            averaging.end_round(weight=shares[RANK] * SIZE / sum(shares), num_steps=4)
            mean = sum(share / sum(shares) * weights_of(each) for share, each in zip(shares, simulated, strict=True))
            velocity = 0.9 * velocity + (outer - mean)
            outer = mean if sync == "local:4" else outer - 0.7 * (outer - mean + 0.9 * velocity)
            for each in simulated:
                set_weights(each, outer)
            torch.testing.assert_close(weights_of(model), outer, rtol=0, atol=2e-6)
            assert averaging.is_averaged
        assert averaging.num_steps == 12


def check_rounds_with_equal_leases_have_the_bits_of_rounds_without():
    for sync in ("local:3", "diloco:3"):
        models = new_model(), new_model()
        plain, leased = (hvd.Averaging(sgd(model), sync) for model in models)
        leased.lease_rounds()
        for number in range(1, 10):
            step(models[0], plain, number)
            step(models[1], leased, number)
            if number % 3 == 0:
                leased.end_round(weight=1.0, num_steps=3)
                assert torch.equal(*map(weights_of, models))


def check_one_fragment_without_delay_is_plain_diloco_to_the_last_bit():
    models = new_model(), new_model()
    plain, streaming = (
        hvd.Averaging(sgd(model), sync)
        for model, sync in zip(models, ("diloco:3", "diloco:3:fragments=1,delay=0,alpha=0"), strict=True)
    )
    for number in range(1, 10):
        step(models[0], plain, number)
        step(models[1], streaming, number)
        assert torch.equal(*map(weights_of, models))
        assert plain.is_averaged == streaming.is_averaged == (number % 3 == 0)


# The elements of new_model in two fragments, cut between parameters: 120 and 62 of 182.
HALVES = slice(0, 120), slice(120, 182)


def check_fragments_are_sent_before_they_change_and_mixed_with_the_weights_of_the_rank():
    model, reference = new_model(), new_model()
    averaging, plain = hvd.Averaging(sgd(model), "diloco:8:fragments=2,delay=3,alpha=0.25"), sgd(reference)
    outer = weights_of(reference)
    velocity = torch.zeros_like(outer)
    for number in range(1, 26):
        step(model, averaging, number)
        step(reference, plain, number)
        everyone = of_all_ranks(reference)
        part = HALVES[((number + 3) // 4 - 1) % 2]
        if (number + 3) % 4 == 0:
            gradient = (outer - everyone).mean(0)[part]
        if number % 4 == 0:
            velocity[part] = 0.9 * velocity[part] + gradient
            outer[part] -= 0.7 * (gradient + 0.9 * velocity[part])
            own = weights_of(reference)
            own[part] = 0.75 * outer[part] + 0.25 * own[part]
            set_weights(reference, own)
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=2e-6)
        assert not averaging.is_averaged
        with averaging.outer_weights():
            torch.testing.assert_close(weights_of(model), outer, rtol=0, atol=2e-6)
            assert all(torch.equal(each, weights_of(model)) for each in of_all_ranks(model))
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=2e-6)


def check_ranks_of_unequal_speed_may_have_unequal_numbers_of_steps():
    model, reference = new_model(), new_model()
    steps = 2 * (RANK % 2 + 1)  # 2 or 4 steps of each rank give a round
    averaging, plain = hvd.Averaging(sgd(model), f"diloco:{2 * steps}:fragments=2,delay=1"), sgd(reference)
    outer = weights_of(reference)
    velocity = torch.zeros_like(outer)
    for number in range(1, 6 * steps + 1):
        step(model, averaging, number)
        step(reference, plain, number)
        part = HALVES[((number + 1) // steps - 1) % 2]
        if (number + 1) % steps == 0:
            gradient = (outer - of_all_ranks(reference)).mean(0)[part]
        if number % steps == 0:
            velocity[part] = 0.9 * velocity[part] + gradient
            outer[part] -= 0.7 * (gradient + 0.9 * velocity[part])
            own = weights_of(reference)
            own[part] = outer[part]
            set_weights(reference, own)
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=2e-6)


def check_a_codec_sends_outer_gradients_as_quantised_gradients_are_sent():
    model, reference, outer = new_model(), new_model(), new_model()
    averaging, plain = hvd.Averaging(sgd(model), "diloco:4:delay=2,codec=int8"), sgd(reference)
    steps = hvd.DistributedOptimizer(
        torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True),
        outer.named_parameters(),
        compression=hvd.Compression.quantized("int8"),
    )
    for number in range(1, 14):
        step(model, averaging, number)
        step(reference, plain, number)
        if number % 4 == 2:
            changes = [(a - b).detach() for a, b in zip(outer.parameters(), reference.parameters(), strict=True)]
        if number % 4 == 0:
            steps.zero_grad()
            sum(
                (weight * change).sum() for weight, change in zip(outer.parameters(), changes, strict=True)
            ).backward()
            steps.step()
            set_weights(reference, weights_of(outer))
        torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=2e-6)
    residuals = averaging.state_dict()["averaging"]["outer"]["memory"]
    assert len(residuals) == 4
    assert any(values["residual"].abs().max() > 0 for values in residuals.values())


def check_the_bytes_of_a_codec_are_those_of_its_bits_once_in_a_period():
    sent = []
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300))
    averaging = hvd.Averaging(torch.optim.SGD(model.parameters(), lr=0.1), "diloco:4:fragments=2,delay=1,codec=int4")
    with (
        mock.patch.object(quantized, "submit_alltoall", counting(quantized.submit_alltoall, sent)),
        mock.patch.object(quantized, "submit_allgather", counting(quantized.submit_allgather, sent)),
    ):
        for _ in range(4):
            averaging.step()
    computed = sum(map(torch.numel, model.parameters())) * (4 + 32 / 512) / 8  # 4 bits, and 32 bits for 512 numbers
    parts, sums = sum(sent[::2]), sum(sent[1::2])
    assert len(sent) == 4
    assert computed <= parts == sums * SIZE < computed * 1.02


def check_a_rank_in_another_round_is_an_error_that_names_both():
    for sync, texts in (
        ("local:4", ("step 4 of local:4", "step 8 of local:4")),
        ("gossip:ring:4", ("step 4 of gossip:ring:4", "step 8 of gossip:ring:4")),
        ("tournament:4", ("step 4 of tournament:4", "step 8 of tournament:4")),
        ("diloco:4", ("round 0 of diloco", "round 1 of diloco")),
        ("diloco:8:fragments=2,delay=1,codec=int8", ("round 0 of diloco", "round 1 of diloco")),
    ):
        model, averaging = averaged(sync)
        averaging.num_steps = 4 if RANK == SIZE - 1 else 0
        with raises(hvd.HorovodInternalError, "ranks disagree on the round", *texts):
            for number in range(1, 5):
                step(model, averaging, number)
        hvd.barrier()


def average_at_once(tensor, **_):
    tensor.copy_(torch.stack(hvd.allgather_object(tensor)).mean(0))
    return mock.MagicMock()


def compare_diloco_with_that_of_torchft():
    from torchft.local_sgd import DiLoCo

    for delay, alpha in ((0, 0.0), (2, 0.0), (2, 0.4)):
        model, reference = new_model(), new_model()
        averaging = hvd.Averaging(sgd(model), f"diloco:8:fragments=2,delay={delay},alpha={alpha}")
        manager = mock.MagicMock(_use_async_quorum=False)
        manager.current_step.side_effect = lambda manager=manager: manager.should_commit.call_count
        manager.should_commit.return_value = True
        manager.allreduce.side_effect = average_at_once
        inner = sgd(reference)
        first, *rest = reference.parameters()
        fragments = [nn.ParameterList(part) for part in ([first], rest)]  # as `HALVES`
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
        with DiLoCo(manager, fragments, inner, outer, 8, fragment_sync_delay=delay, fragment_update_alpha=alpha):
            for number in range(1, 34):
                step(model, averaging, number)
                step(reference, inner, number)
                torch.testing.assert_close(weights_of(model), weights_of(reference), rtol=0, atol=1e-6)
        assert manager.should_commit.call_count == 8


def check_gossip_keeps_the_mean_and_brings_the_ranks_together():
    for graph in ("ring", "exponential"):
        model = new_model().double()
        set_weights(model, weights_of(model) + RANK)
        averaging = hvd.Averaging(torch.optim.SGD(model.parameters(), lr=0.0), f"gossip:{graph}")
        start = of_all_ranks(model)
        mixing = torch.eye(SIZE, dtype=torch.float64)
        for rank in range(SIZE):
            mixing[neighbours("ring", SIZE, rank, 0), rank] = 1
        # The second largest magnitude of the eigenvalues bounds how fast the ranks of a ring agree.
        second = torch.linalg.eigvalsh(mixing / mixing.sum(1, keepdim=True)).abs().sort().values[-2]
        for number in range(1, 9):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            averaging.step()
            now = of_all_ranks(model)
            torch.testing.assert_close(now.mean(0), start.mean(0), rtol=0, atol=1e-12)
            if graph == "ring":
                apart, bound = ((each - each.mean(0)).norm() for each in (now, start))
                assert apart <= bound * second**number + 1e-9
        assert (now - now.mean(0)).abs().max() < 0.1


def check_fragments_of_gossip_take_turns_and_each_is_mixed_as_the_whole():
    for graph in ("ring", "exponential"):
        start = new_model()
        set_weights(start, weights_of(start) + RANK)
        models = copy.deepcopy(start), copy.deepcopy(start)
        syncs = f"gossip:{graph}:4", f"gossip:{graph}:4:fragments=2"
        whole, parts = (
            hvd.Averaging(torch.optim.SGD(model.parameters(), lr=0.0), sync)
            for model, sync in zip(models, syncs, strict=True)
        )
        for number in range(1, 13):
            before = copy.deepcopy(models[1])
            step(models[0], whole, number)
            step(models[1], parts, number)
            (first, *rest), (first_before, *rest_before) = models[1].parameters(), before.parameters()
            assert number % 4 == 2 or torch.equal(first, first_before)
            assert number % 4 == 0 or all(map(torch.equal, rest, rest_before))
            if number % 4 == 0:
                assert torch.equal(weights_of(models[0]), weights_of(models[1]))


def replica(sync="tournament:3", offset=0.0, optimizer=sgd, **options):
    """A model whose loss depends on its rank, its optimizer, and the losses that its judge has returned."""
    model = nn.Sequential(*new_model(), nn.BatchNorm1d(2))
    losses = []

    def judge():
        losses.append(offset + float(weights_of(model).square().sum()))
        return losses[-1]

    buffers = list(model.buffers())
    return model, hvd.Averaging(optimizer(model), sync, judge=judge, buffers=buffers, seed=3, **options), losses


def state_of(model, optimizer):
    """All that a loser takes over, as text."""
    moments = [sorted(state.items()) for _, state in sorted(optimizer.state_dict()["state"].items())]
    return repr(
        [tensor.tolist() for tensor in model.state_dict().values()]
        + [(name, torch.as_tensor(value).tolist()) for state in moments for name, value in state]
    )


def check_a_loser_has_the_state_of_its_winner_to_the_last_bit():
    for make in (sgd, lambda model: torch.optim.AdamW(model.parameters(), 0.01)):
        model, averaging, losses = replica(optimizer=make)
        for number in range(1, 13):
            step(model, averaging, number)
            states = hvd.allgather_object(state_of(model, averaging))
            if number % 3:
                assert len(set(states)) == SIZE, number
                continue
            (played,) = set(hvd.allgather_object(json.dumps(averaging.tournament.rounds[-1])))
            played = json.loads(played)
            assert played["losses"] == hvd.allgather_object(losses[-1])
            assert (played["step"], played["round"], len(played["pairs"])) == (number, number // 3 - 1, SIZE // 2)
            for winner, loser in played["pairs"]:
                assert played["losses"][winner] < played["losses"][loser]
                assert states[winner] == states[loser]
            assert len(set(states)) == SIZE - SIZE // 2
            assert not averaging.is_averaged
        best = min(range(SIZE), key=hvd.allgather_object(float(weights_of(model).square().sum())).__getitem__)
        with averaging.outer_weights():
            assert state_of(model, sgd(model)) in hvd.allgather_object(state_of(model, sgd(model)))
            assert all(torch.equal(each, weights_of(model)) for each in of_all_ranks(model))
        assert averaging.tournament.describe()["winner"] == best
        assert hvd.allgather_object(state_of(model, averaging)) == states


def check_the_lower_rank_wins_a_tie_and_any_rank_wins_against_nan():
    for loss, expected in ((lambda: 1.0, 0), (lambda: float("nan") if RANK == 0 else 1.0, 1)):
        model = new_model()
        averaging = hvd.Averaging(sgd(model), "tournament:1", judge=loss)
        for number in range(8):
            step(model, averaging, number)
        assert averaging.tournament.rounds[-1]["losses"][0] == (None if expected else 1.0)
        for played in averaging.tournament.rounds:
            assert all((winner < loser) != (0 in (winner, loser) and expected) for winner, loser in played["pairs"])
        with averaging.outer_weights():
            assert averaging.tournament.comparison["winner"] == expected


def check_learning_rates_differ_and_a_loser_perturbs_that_of_its_winner():
    model, averaging, _ = replica("tournament:1:perturb=1.5")
    reference = nn.Sequential(*new_model(), nn.BatchNorm1d(2))
    exponents = [first_exponent(3, rank) for rank in range(SIZE)]
    for number in range(6):
        reference.load_state_dict(model.state_dict())
        plain = sgd(reference)
        plain.load_state_dict({k: v for k, v in copy.deepcopy(averaging.state_dict()).items() if k != "averaging"})
        plain.param_groups[0]["lr"] = 0.1 * 1.5 ** exponents[RANK]
        step(model, averaging, number)
        step(reference, plain, number)
        played, own = averaging.tournament.rounds[-1], hvd.allgather_object(weights_of(reference))
        for winner, loser in played["pairs"]:
            exponents[loser] = exponents[winner] + change_exponent(3, number, loser)
        assert played["factors"] == [1.5**exponent for exponent in exponents]
        winner = next((winner for winner, loser in played["pairs"] if loser == RANK), RANK)
        assert torch.equal(weights_of(model), own[winner])
        assert averaging.param_groups[0]["lr"] == 0.1


def averaged(sync):
    if sync.startswith("tournament"):
        return replica(sync)[:2]
    model = new_model()
    return model, hvd.Averaging(sgd(model), sync)


def check_a_state_goes_on_to_the_same_bits():
    # After 5 steps, rounds of DiLoCo with a delay are in the middle: the first message, and the second, are sent.
    for sync in (
        "local:3",
        "postlocal:2:3",
        "easgd:3:0.5",
        "diloco:3",
        "diloco:8:delay=5,codec=int8",
        "diloco:12:fragments=2,delay=5,alpha=0.5,codec=onebit",
        "diloco:12:fragments=2,delay=4,alpha=0.5",
        "diloco:4:delay=2,codec=int4",
        "diloco:4:codec=qsgd",
        "gossip:exponential",
        "gossip:ring:4:fragments=2",
        "tournament:3:perturb=1.2",
    ):
        model, averaging = averaged(sync)
        for number in range(1, 6):
            step(model, averaging, number)
        saved = copy.deepcopy((model.state_dict(), averaging.state_dict()))
        again, resumed = averaged(sync)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for number in range(6, 20):
            step(model, averaging, number)
            step(again, resumed, number)
            assert torch.equal(weights_of(model), weights_of(again)), sync
        sgd(again).load_state_dict({name: value for name, value in saved[1].items() if name != "averaging"})
        if averaging.tournament is not None and RANK == 0:
            assert resumed.tournament.describe() == averaging.tournament.describe()
            assert [played["step"] for played in resumed.tournament.rounds] == [3, 6, 9, 12, 15, 18]


def check_a_state_from_the_middle_of_a_round_is_not_continued_by_another_policy():
    model = new_model()
    averaging = hvd.Averaging(sgd(model), "diloco:4:delay=2")
    for number in range(1, 5):
        step(model, averaging, number)
    end = copy.deepcopy(averaging.state_dict())
    for number in range(5, 8):
        step(model, averaging, number)
    middle = averaging.state_dict()
    other = hvd.Averaging(sgd(new_model()), "diloco:8:delay=1")
    with raises(ValueError, "from the middle of a round of sync 'diloco:4:delay=2'"):
        other.load_state_dict(middle)
    other.load_state_dict(end)
    averaging.load_state_dict(end)  # discards the round in progress
    assert averaging.num_steps == 4
    step(model, averaging, 8)


def check_residuals_are_loaded_by_the_rank_that_has_saved_them():
    model = new_model()
    averaging = hvd.Averaging(sgd(model), "diloco:1:codec=int4")
    step(model, averaging, 1)
    averaging.load_state_dict(hvd.allgather_object(averaging.state_dict())[0])
    memory = averaging.state_dict()["averaging"]["outer"]["memory"]
    assert all(("residual" in values) == (RANK == 0) for values in memory.values())


def check_more_fragments_than_parameters_are_refused():
    with raises(ValueError, "4 trainable parameters cannot have 5 fragments"):
        hvd.Averaging(sgd(new_model()), "diloco:5:fragments=5")
    with raises(ValueError, "no outer weights"), hvd.Averaging(sgd(new_model()), "local:2").outer_weights():
        pass


def check_an_optimizer_that_combines_gradients_is_refused():
    with raises(ValueError, "give Averaging the optimizer of torch"):
        hvd.Averaging(hvd.DistributedOptimizer(sgd(new_model())), "local:2")
    with raises(ValueError, "expected local:STEPS"):
        hvd.Averaging(sgd(new_model()), "bsp")
    with raises(ValueError, "sync 'tournament:2' needs judge=: a function without arguments"):
        hvd.Averaging(sgd(new_model()), "tournament:2")
    with raises(ValueError, "judge= is for tournaments only"):
        hvd.Averaging(sgd(new_model()), "local:2", judge=float)


run_checks({"check_of_torchft": compare_diloco_with_that_of_torchft} if sys.argv[1:] == ["torchft"] else globals())
hvd.shutdown()

"""What is profiled, on one rank: steps are those of training, and its two loaders share one pass over the data."""

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.planning.step import StepMode
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.trainer.recipes.build import compile_model
from datasvc.trainer.recipes.profiling.measure.layer_times import HostClock, LayerTimer
from datasvc.trainer.recipes.profiling.measure.layers import time_pass
from datasvc.trainer.recipes.profiling.measure.measure import Bench
from datasvc.trainer.recipes.profiling.measure.messages import measure_traffic
from datasvc.trainer.recipes.profiling.measure.profiled_run import PARTS, open_profiled_run
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.update import update
from tests.trainer.recipes.test_train import VOCABULARY, write_tokens


@pytest.fixture(scope="module")
def repository(digits_folder, tmp_path_factory):
    repository = Repository.create(str(tmp_path_factory.mktemp("profiled") / "repo"))
    ingest(repository, str(digits_folder / "val"), "digits", shard_bytes=16 << 10, val_fraction=0.1)
    ingest(repository, write_tokens(tmp_path_factory.mktemp("tokens")), "tokens")
    return repository


@pytest.fixture
def opened(repository):
    hvd.init()
    try:
        yield lambda **settings: open_profiled_run(
            TrainConfig(
                **{"data": "digits", "repo": repository.url, "name": "p", "size": 16, "batch_size": 8, **settings}
            )
        )
    finally:
        hvd.shutdown()


def test_loaders_that_take_turns_hand_over_one_pass_over_the_data(opened):
    def images(turns):
        with opened(prefetch=2) as run:
            for ahead in turns:
                run.loaders.turn_to(ahead=ahead)
                for _ in range(3):
                    yield next(run.loaders).images.clone()

    in_turn, by_one = list(images((False, True, True, False))), list(images((False,) * 4))
    assert len(in_turn) == 12
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(in_turn, by_one, strict=True))


def test_a_loader_holds_nothing_while_it_is_not_its_turn(opened, tmp_path):
    windowed = {"cache": str(tmp_path / "cache"), "shuffle": "windowed", "block": 8}
    with opened(cache_budget="1MB", prefetch=4, **windowed) as run:
        held = []
        for ahead in (True, False, True):
            before = run.loaders.current
            run.loaders.turn_to(ahead=ahead)
            for _ in range(15):
                next(run.loaders)
            held.append(before._decoder)
        assert held == [None] * 3
        assert run.loaders.current._decoder is not None


def test_a_profile_of_combined_steps_is_refused(opened):
    with (
        pytest.raises(
            ConfigError, match="op is adasum; a profile measures all-reduces of gradients: give --op average"
        ),
        opened(op="adasum"),
    ):
        pass


def test_a_profiled_step_is_the_one_of_training_and_changes_no_weight(opened):
    with opened(ema_decay=0.9, clip_norm=1e-3) as run:
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        update(run, next(run.loaders))
        gradients = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
        assert gradients.norm().item() == pytest.approx(1e-3, rel=1e-3)
        assert run.average.state_dict()["num_updates"] == 1
        assert all(torch.equal(p, weight) for p, weight in zip(run.model.parameters(), before, strict=True))


@pytest.mark.parametrize("data", ["digits", "tokens"])
def test_a_step_says_when_each_of_its_parts_ends(opened, data):
    options = ("context=16", "layers=1", "heads=2", "width=16") if data == "tokens" else ()
    said = []
    with opened(data=data, micro_batch=4, vocabulary=VOCABULARY, model_option=options) as run:
        update(run, next(run.loaders), said.append)
    targets = ["targets"] if data == "tokens" else []
    passes = ["forward", "backward"] * 2
    assert said == ["update", "transfer", *targets, *passes, "all-reduce", "update"]
    assert set(said) <= set(PARTS)


def test_a_compiled_model_says_when_its_gradients_are_there(opened):
    with opened(compile="eager") as run:
        batch = next(run.loaders)
        time_pass(run, batch, LayerTimer(run.model, HostClock()))
        compile_model(run.model, run.config.compile)
        traffic = measure_traffic(run, batch, 2)
        assert sum(bucket.size_bytes for bucket in traffic.buckets) == sum(
            4 * parameter.numel() for parameter in run.model.parameters()
        )
        assert all(0 < bucket.ready_share <= 1 for bucket in traffic.buckets)


def test_a_round_leaves_out_of_the_caller_s_work_what_it_waited_for(opened):
    with opened() as run:
        bench = Bench(run)
        batch = next(run.loaders)
        traffic = measure_traffic(run, batch, 1)
        costs = bench.measure_round(traffic, 2).costs
        assert costs.caller_s <= costs.io_s
        assert costs.io_s > 0
        assert bench.run(StepMode.OVERLAPPED, 2) > 0

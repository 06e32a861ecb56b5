"""What a profile says besides its tables."""

import dataclasses
import json

import pytest

from datasvc.loaders.profiling.step_times import Stage, Totals
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.prediction import predict
from datasvc.trainer.recipes.profiling.measure.layers import Layers
from datasvc.trainer.recipes.profiling.measure.measure import _caller_s
from datasvc.trainer.recipes.profiling.measure.messages import StepTraffic
from datasvc.trainer.recipes.profiling.measure.profile import MeasuredRound, Profile
from datasvc.trainer.recipes.settings.config import TrainConfig
from tests.planning.examples import EXAMPLE

CONFIG = TrainConfig(data="d", repo="r", name="n", model="resnet18", prefetch=4)
CLUSTER = Cluster(16, Link(1.25e9, 50e-6), 8)
PREDICTIONS = (predict(EXAMPLE, CLUSTER),)


def make_profile(world_size=2, config=CONFIG, ahead_over_io=(1.0,), predictions=PREDICTIONS):
    rounds = [MeasuredRound(EXAMPLE, each) for each in ahead_over_io]
    return Profile(world_size, config, "images", rounds, Layers((), 0.0, ()), StepTraffic((), 0.001), predictions)


def test_a_profile_knows_what_was_run_and_what_it_predicts_for():
    found = json.loads(json.dumps(make_profile().to_dict()))
    assert (found["config"]["model"], found["prefetch"], found["world_size"]) == ("resnet18", 4, 2)
    assert found["predictions"][0]["cluster"] == dataclasses.asdict(CLUSTER)
    assert "for nodes of 8 ranks, 1.25 GB/s and 50 us between them, 1 images a rank" in make_profile().describe(1)


def test_layers_of_a_model_that_is_compiled_are_said_not_to_be():
    compiled = dataclasses.replace(CONFIG, compile="inductor")
    assert "layer, not compiled" in make_profile(config=compiled).describe(1)
    assert "not compiled" not in make_profile().describe(1)


def test_predictions_from_one_rank_say_what_they_leave_out():
    assert make_profile().notes == []
    assert make_profile(1, predictions=()).notes == []
    (note,) = make_profile(1).notes
    assert "profile two ranks or more" in note
    assert note in make_profile(1).describe(1)


@pytest.mark.parametrize(("ratios", "num_notes"), [((1.0, 1.05, 1.5), 0), ((0.5, 1.2, 1.4), 1), ((1.3,), 1)])
def test_prefetching_that_seems_slower_in_most_rounds_is_said_not_hidden(ratios, num_notes):
    notes = make_profile(ahead_over_io=ratios).notes
    assert len(notes) == num_notes
    assert all("took 1.30 times as long" in note for note in notes)


def test_what_is_fetched_or_waited_for_is_no_work_of_the_training_thread():
    totals = Totals(
        wait_s=10.0,
        blocked_s={Stage.ORIGIN: 5.0, Stage.PEER: 1.0, Stage.DECODE: 3.0, Stage.READ: 0.5, Stage.LOADER: 0.5},
        waiting_s={Stage.ORIGIN: 0.1, Stage.DECODE: 2.75},
    )
    assert _caller_s(totals) == pytest.approx(0.25 + 0.5 + 0.5)

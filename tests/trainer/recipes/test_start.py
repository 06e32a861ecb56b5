"""What the settings of a run reach when it is built: its cache, its device, and the layout of its model."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes import build, start
from datasvc.trainer.recipes.build import build_learner
from datasvc.trainer.recipes.layouts.divided_model import LayoutOptions
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.settings.groups.job import CacheSettings
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import DataPlacement


class ReachedError(Exception):
    """Ends what is tested, at the call that is looked at."""


def make_config(**settings):
    gpt = {"model": "gpt", "model_option": ("layers=2", "heads=2", "width=8", "context=8"), "vocabulary": 11}
    return TrainConfig(data="tokens@1", repo="unused", name="unused", global_batch=8, **gpt, **settings)


@pytest.fixture
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("peers", ["ranks", "nodes.json"])
def test_all_settings_of_the_cache_reach_it(monkeypatch, peers):
    calls = []
    nodes = SimpleNamespace(peers="the nodes of the job")
    monkeypatch.setattr(start, "Cache", lambda *arguments, **options: calls.append((*arguments, options)))
    monkeypatch.setattr(
        start, "RankNodes", lambda *arguments, **options: calls.append((*arguments, options)) or nodes
    )
    monkeypatch.setattr(start, "open_peers", lambda text: f"the nodes of {text}")
    config = make_config(cache="folder", cache_budget="7MB", tenant="other", peers=peers)
    assert all(getattr(config, each.name) != each.default for each in dataclasses.fields(CacheSettings))
    _, found = start.open_cache(config)
    if peers == "ranks":
        assert calls.pop(0) == ("folder", ("unused",), {"budget": "7MB"})
    assert found is (nodes if peers == "ranks" else None)
    expected = nodes.peers if peers == "ranks" else "the nodes of nodes.json"
    assert calls == [("folder", {"budget": "7MB", "tenant": "other", "peers": expected})]


@pytest.mark.usefixtures("world_of_one")
def test_the_given_number_of_decoding_threads_replaces_that_of_the_processors(monkeypatch):
    monkeypatch.setattr(start, "count_processors", lambda: 5)
    numbers = [start.choose_place(make_config(decode_threads=n), Layout()).num_threads for n in (None, 3)]
    assert numbers == [5, 3]


@pytest.mark.parametrize("is_on", [False, True])
def test_cudnn_measures_its_convolutions_if_it_is_told_to(monkeypatch, is_on):
    devices = []

    def stop(*_arguments):
        raise ReachedError

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not is_on)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(build, "build_model", stop)
    place = DataPlacement(rank=0, world_size=1, device=torch.device("cuda:1"), num_threads=1)
    with pytest.raises(ReachedError):
        build_learner(make_config(cudnn_benchmark=is_on), None, None, place, Layout())
    assert devices == [place.device]
    assert torch.backends.cudnn.benchmark == is_on


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LayoutOptions()),
        (
            {"pipeline_schedule": "gpipe", "zero": 2, "recompute": True, "offload": True},
            LayoutOptions(pipeline_schedule="gpipe", zero=2, recompute=True, offload=True),
        ),
    ],
)
def test_the_options_of_a_layout_reach_its_engines(monkeypatch, settings, expected):
    calls = []

    def record(_model, layout, options, **others):
        calls.append((layout, options, others))
        raise ReachedError

    monkeypatch.setattr(build, "apply_layout", record)
    monkeypatch.setattr(hvd, "size", lambda: 4)
    monkeypatch.setattr(hvd, "broadcast_parameters", lambda *_, **__: None)
    layout = Layout(shard=2, pipeline=2)
    config = make_config(layout=str(layout), micro_batch=1, **settings)
    place = DataPlacement(rank=0, world_size=2, device=torch.device("cpu"), num_threads=1)
    batches = plan_batches(config, layout.num_data_ranks)
    with pytest.raises(ReachedError):
        build_learner(config, LanguageModelling(config, None), batches, place, layout, block=8)
    others = {"rank": 0, "device": place.device, "num_micro_batches": 4, "block": 8, "averages_weights": False}
    assert calls == [(layout, expected, others)]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_that_is_not_divided_is_recomputed_if_the_run_says_so(monkeypatch, recompute):
    calls = []
    monkeypatch.setattr(build, "recompute_activations", calls.append)
    config = make_config(recompute=recompute)
    place = DataPlacement(rank=0, world_size=1, device=torch.device("cpu"), num_threads=1)
    learner = build_learner(config, LanguageModelling(config, None), plan_batches(config, 1), place, Layout())
    assert calls == ([learner.model] if recompute else [])


@pytest.mark.usefixtures("world_of_one")
def test_activations_are_in_host_memory_if_the_run_says_so(monkeypatch):
    calls = []
    monkeypatch.setattr(build, "offload_activations", lambda model, **options: calls.append((model, options)))
    config = make_config(offload_activations=True)
    place = DataPlacement(rank=0, world_size=1, device=torch.device("cpu"), num_threads=1)
    learner = build_learner(config, LanguageModelling(config, None), plan_batches(config, 1), place, Layout())
    assert calls == [(learner.model, {"pin_memory": False})]

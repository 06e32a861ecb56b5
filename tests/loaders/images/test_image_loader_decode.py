"""What decodes, as a part of the loader's state, and what it is chosen on."""

import json
import logging

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.loaders import AugmentConfig, DecodeConfig, ImageLoader, Mixture
from datasvc.loaders.decode.choice.choice import DecodeChoice
from datasvc.loaders.decode.choice.trial import Trials
from datasvc.loaders.torch import OrderBatchSampler
from datasvc.models import ConsumptionTracker, DataUse, save
from datasvc.order import OrderState
from datasvc.shards import ingest, open_dataset
from tests.samples import jpeg


def make(split, batch_size=8, **options):
    return ImageLoader(
        split,
        **{"batch_size": batch_size, "training": True, "size": 32, "decode": DecodeConfig(num_threads=1), **options},
    )


def first(loader):
    with loader:
        return next(iter(loader))


@pytest.fixture
def samples(digits, request):
    return Mixture([(digits["val"], 1), (digits["train"], 1)]) if request.param == "mixture" else digits["val"]


@pytest.mark.parametrize("samples", ["split", "mixture"], indirect=True)
def test_the_state_says_what_decodes_and_a_resumed_run_decodes_with_it(samples):
    loader = make(samples, decode="pillow")
    assert loader.state_dict()["decode"] == "pillow"
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    expected = first(loader)
    resumed = make(samples)
    assert resumed.decode == "cpu"
    resumed.load_state_dict(state)
    assert resumed.decode == "pillow"
    assert torch.equal(first(resumed).images, expected.images)
    assert resumed.state_dict()["decode"] == "pillow"


@pytest.mark.parametrize("samples", ["split", "mixture"], indirect=True)
def test_the_state_of_an_evaluation_names_its_kind_and_another_kind_is_a_warning(samples, caplog):
    exact = {"training": False, "tail": "short"}
    window = exact | {"augment": AugmentConfig(evaluation="window")}
    assert "evaluation" not in make(samples).state_dict()
    state = json.loads(json.dumps(make(samples, **exact).state_dict()))
    assert state["evaluation"] == "torchvision"
    assert make(samples, **window).state_dict()["evaluation"] == "window"
    old = {name: value for name, value in state.items() if name != "evaluation"}
    same = [(exact, state), (window, old), ({}, {**make(samples).state_dict(), "evaluation": "window"})]
    for options, fitting in same:
        make(samples, **options).load_state_dict(fitting)
    assert caplog.text == ""
    make(samples, **window).load_state_dict(state)
    assert "saved by a loader with evaluation='torchvision'; this one has evaluation='window'" in caplog.text
    caplog.clear()
    make(samples, **exact).load_state_dict(old)
    assert "saved by a loader with evaluation='window'; this one has evaluation='torchvision'" in caplog.text
    with pytest.raises(ConfigError, match="evaluation is 'exact'; expected one of torchvision, window"):
        make(samples, **exact).load_state_dict({**state, "evaluation": "exact"})


def test_the_evaluation_of_a_model_version_is_recorded(digits, repository):
    loader = make(digits["val"], training=False)
    saved = save(repository, "m", {}, step=0, data=[DataUse("digits@1", "val", loader.state_dict(), "evaluation")])
    assert repository.entry(saved).content["data"][0]["state"]["evaluation"] == "torchvision"
    assert ConsumptionTracker(loader).use().state["evaluation"] == "torchvision"


@pytest.mark.parametrize("samples", ["split", "mixture"], indirect=True)
def test_a_state_from_before_backends_were_kept_loads_as_ever(samples):
    loader = make(samples)
    next(iter(loader))
    old = {name: value for name, value in loader.state_dict().items() if name != "decode"}
    expected = first(loader)
    resumed = make(samples)
    resumed.load_state_dict(old)
    assert torch.equal(first(resumed).images, expected.images)


def test_a_state_of_a_gpu_goes_on_without_one_and_says_that_pixels_differ(digits, caplog):
    loader = make(digits["val"])
    next(iter(loader))
    resumed = make(digits["val"])
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(loader.state_dict() | {"decode": "gpu-window"})
    assert "with 'gpu-window', which decode='auto' does not allow here; this loader decodes with 'cpu'" in caplog.text
    assert np.array_equal(first(resumed).positions, first(loader).positions)


def test_a_state_with_a_decoder_that_nobody_knows_is_refused_and_nothing_moves(digits):
    loader = make(digits["val"])
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ConfigError, match="decode of a loader's state is 'opencv'"):
        loader.load_state_dict(before | {"position": 0, "decode": "opencv"})
    assert loader.state_dict() == before


def test_loaders_that_decode_otherwise_take_the_state_for_its_order(digits):
    loader = make(digits["val"])
    next(iter(loader))
    state = loader.state_dict()
    assert OrderState.from_dict(state).position == 8
    batches = OrderBatchSampler(digits["val"], batch_size=8, shuffle="global")
    batches.load_state_dict(state)
    assert batches.cursor == (0, 8)


def test_the_first_batch_settles_what_decodes_for_this_run_and_those_that_resume_it(digits):
    """Two backends of the CPU in place of those of a GPU."""
    tried = []

    def try_in_child(_config, candidates, batches):
        tried.append((list(candidates), len(batches)))
        return Trials(rates={"cpu": 10.0, "pillow": 20.0})

    loader = make(digits["val"])
    loader._choice = DecodeChoice(
        "auto", ["cpu", "pillow"], config=loader._config, ranks=loader.ranks, try_in_child=try_in_child
    )
    assert "decode" not in loader.state_dict()
    batch = next(iter(loader))
    assert loader.decode == loader.state_dict()["decode"] == "pillow"
    assert torch.equal(batch.images, first(make(digits["val"], decode="pillow")).images)
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    assert tried == [(["cpu", "pillow"], 4)]


def test_a_trial_gets_the_next_distinct_batches_and_the_run_stays_where_it_is(digits, monkeypatch):
    loader = make(digits["val"])
    next(iter(loader))
    before, retired = loader.state_dict(), []
    monkeypatch.setattr(loader._batches, "retire", retired.append)  # so that a cache needs no room for all of them
    drawn = loader._draw_trial()
    monkeypatch.undo()
    assert len(retired) == 4
    assert [len(batch.images) for batch in drawn] == [8] * 4
    assert len({image for batch in drawn for image in batch.images}) == 32
    assert drawn[0].windows.starts.shape == (8, 2)
    assert loader.state_dict() == before
    with make(digits["val"]) as whole:
        batches = [batch for batch, _ in zip(whole, range(2), strict=False)]
    assert torch.equal(first(loader).images, batches[1].images)


def test_a_trial_gets_no_more_bytes_than_its_share(digits, monkeypatch):
    monkeypatch.setattr("datasvc.loaders.images.image_loader._TRIAL_BYTES", 1)
    assert len(make(digits["val"])._draw_trial()) == 1


@pytest.fixture
def large(repository):
    samples = [{"key": str(number), "image": jpeg(300, 200, seed=number)} for number in range(8)]
    ingest(repository, samples, "large")
    return open_dataset(repository, "large")["train"]


def test_the_state_of_large_jpegs_has_their_scale_and_without_it_they_are_decoded_at_full_size(large, digits, caplog):
    options = {"batch_size": 4, "size": 16, "augment": AugmentConfig(scale=(0.9, 1))}
    at_full_size = options | {"decode": DecodeConfig(decode_scale="full")}
    assert "decode_scale" not in make(digits["val"]).state_dict()
    assert "decode_scale" not in make(large, **options, training=False).state_dict()  # it equals torchvision's
    old = json.loads(json.dumps(make(large, **at_full_size).state_dict()))
    assert "decode_scale" not in old
    loader = make(large, **options)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["decode_scale"] == "auto"
    expected = first(loader).images
    resumed = make(large, **options)
    resumed.load_state_dict(state)
    assert torch.equal(first(resumed).images, expected)
    # A run of an earlier release continues with its pixels, also after another resume.
    continued = make(large, **options)
    continued.load_state_dict(old)
    assert "decode_scale" not in continued.state_dict()
    full = first(make(large, **at_full_size)).images
    assert torch.equal(first(continued).images, full)
    assert not torch.equal(first(make(large, **options)).images, full)
    assert caplog.text == ""
    make(large, **at_full_size).load_state_dict(state)
    assert "saved by a loader with decode_scale='auto', and this one decodes at full size" in caplog.text
    with pytest.raises(ConfigError, match="decode_scale is 'half'; expected one of auto, full"):
        make(large, **options).load_state_dict({**state, "decode_scale": "half"})


@pytest.mark.parametrize(("backend", "has_scale"), [("gpu-whole", False), ("gpu-window", False), ("pillow", True)])
def test_the_state_of_a_backend_that_decodes_at_full_size_has_no_scale(large, backend, has_scale):
    """Elsewhere, a CPU would continue the run of a GPU with reduced photos."""
    loader = make(large, size=16)
    assert "decode_scale" in loader.state_dict()
    loader._choice = DecodeChoice("auto", [backend], config=loader._config, ranks=loader.ranks)
    assert ("decode_scale" in loader.state_dict()) == has_scale


def test_jobs_of_a_decode_group_share_no_batches_of_another_scale(large, monkeypatch):
    kinds = []
    loader = make(large, batch_size=4, size=16, decode_group="scales")
    make_decoder = loader.sharing.make_decoder
    monkeypatch.setattr(
        loader.sharing, "make_decoder", lambda inner, **kind: kinds.append(kind) or make_decoder(inner, **kind)
    )
    next(iter(loader))
    state = {name: value for name, value in loader.state_dict().items() if name != "decode_scale"}
    loader.load_state_dict(state)
    first(loader)
    assert [kind["decode_scale"] for kind in kinds] == ["auto", "full"]

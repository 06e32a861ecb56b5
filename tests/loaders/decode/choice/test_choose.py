"""Which backend decodes."""

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders.decode.choice.choose import ON_GPU, plan_candidates

NOTHING_MISSING = {}
NO_CODEC = {"cpu": "install nvImageCodec"}
NO_DALI = dict.fromkeys(ON_GPU, "install DALI")


def plan(requested, *, on_gpu=False, has_transform=False, missing=NOTHING_MISSING):
    return list(plan_candidates(requested, on_gpu=on_gpu, has_transform=has_transform, missing=missing))


def test_auto_is_the_cpu_without_a_gpu_and_pillow_where_that_decoder_is_missing():
    assert plan("auto") == ["cpu"]
    assert plan("auto", missing=NO_CODEC) == ["pillow"]
    assert plan("auto", missing=NO_CODEC | NO_DALI) == ["pillow"]


def test_auto_tries_all_with_a_gpu_but_what_is_missing_or_cannot_and_always_one_of_the_cpu():
    assert plan("auto", on_gpu=True) == ["cpu", "gpu-window", "gpu-whole"]
    assert plan("auto", on_gpu=True, missing=NO_DALI) == ["cpu"]
    assert plan("auto", on_gpu=True, missing=NO_CODEC) == ["pillow", "gpu-window", "gpu-whole"]
    assert plan("auto", on_gpu=True, has_transform=True) == ["cpu"]


def test_gpu_is_the_better_of_two_graphs_and_each_can_be_asked_for():
    assert plan("gpu", on_gpu=True) == ["gpu-window", "gpu-whole"]
    for graph in ON_GPU:
        assert plan(graph, on_gpu=True) == [graph]


def test_what_is_asked_for_is_used_or_refused_with_what_to_do():
    for wanted in ("cpu", "pillow"):
        assert plan(wanted) == plan(wanted, on_gpu=True, has_transform=True) == [wanted]
    for options, message in (
        ({"requested": "cpu", "missing": NO_CODEC}, "install nvImageCodec"),
        ({"requested": "gpu", "missing": NO_DALI, "on_gpu": True}, "install DALI"),
        ({"requested": "gpu-whole", "missing": NO_DALI, "on_gpu": True}, "install DALI"),
        ({"requested": "gpu"}, "decode='gpu' leaves the images on a GPU; give device='cuda'"),
        ({"requested": "gpu-window"}, "decode='gpu-window' leaves the images on a GPU; give device='cuda'"),
        ({"requested": "gpu", "on_gpu": True, "has_transform": True}, "use decode='cpu'"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(**options)

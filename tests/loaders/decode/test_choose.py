"""Which backend decodes."""

import pytest

from datasvc.errors import ConfigError
from loaders.decode.choose import choose_fastest, plan_candidates

NOTHING_MISSING = {}
NO_CODEC = {"cpu": "install nvImageCodec"}
NO_DALI = {"gpu": "install DALI"}


def plan(wanted, *, on_gpu=False, has_edits=False, missing=NOTHING_MISSING):
    return list(plan_candidates(wanted, on_gpu=on_gpu, has_edits=has_edits, missing=missing))


def test_auto_is_the_cpu_without_a_gpu_and_pillow_where_that_decoder_is_missing():
    assert plan("auto") == ["cpu"]
    assert plan("auto", missing=NO_CODEC) == ["pillow"]
    assert plan("auto", missing=NO_CODEC | NO_DALI) == ["pillow"]


def test_auto_measures_both_with_a_gpu_unless_one_is_missing_or_cannot():
    assert plan("auto", on_gpu=True) == ["cpu", "gpu"]
    assert plan("auto", on_gpu=True, missing=NO_DALI) == ["cpu"]
    assert plan("auto", on_gpu=True, missing=NO_CODEC) == ["gpu"]
    assert plan("auto", on_gpu=True, has_edits=True) == ["cpu"]


def test_what_is_asked_for_is_used_or_refused_with_what_to_do():
    for wanted in ("cpu", "pillow"):
        assert plan(wanted) == plan(wanted, on_gpu=True, has_edits=True) == [wanted]
    assert plan("gpu", on_gpu=True) == ["gpu"]
    for options, message in (
        ({"wanted": "cpu", "missing": NO_CODEC}, "install nvImageCodec"),
        ({"wanted": "gpu", "missing": NO_DALI, "on_gpu": True}, "install DALI"),
        ({"wanted": "gpu"}, "give device='cuda'"),
        ({"wanted": "gpu", "on_gpu": True, "has_edits": True}, "use decode='cpu'"),
        ({"wanted": "opencv"}, "expected one of auto, cpu, gpu, pillow"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(**options)


def test_the_fastest_is_chosen_and_the_first_of_equals():
    assert choose_fastest({"cpu": 900.0, "gpu": 2500.0}) == "gpu"
    assert choose_fastest({"cpu": 900.0, "gpu": 900.0}) == "cpu"

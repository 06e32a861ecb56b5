"""A loader's stages in torch's own profiler, and in a tool that reads NVTX."""

import threading

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.profiling import step_times
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.trainer.env import environment

ALL_THREADS = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}


def recorded(run, **options):
    """Return how often each of our ranges was recorded while `run` ran."""
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        run()
    names = [event.name for event in profiler.events() if event.name.startswith("datasvc.loader.")]
    return {name.removeprefix("datasvc.loader."): names.count(name) for name in names}


def test_a_trace_of_torch_shows_the_stages_of_a_batch_and_of_all_threads_those_beside(digits):
    with ImageLoader(
        digits["val"], batch_size=8, training=False, size=32, decode=DecodeConfig(num_threads=1, prefetch=0)
    ) as loader:
        batches = iter(loader)
        next(batches)
        own = recorded(lambda: next(batches))
        everywhere = recorded(lambda: next(batches), **ALL_THREADS)
    assert {name: own[name] for name in ("batch", "read", "wait", "collate")} == {
        "batch": 1,
        "read": 1,
        "wait": 1,
        "collate": 1,
    }
    assert everywhere["decode"] > own["decode"]  # those of the decoding thread, which the call waits for


def test_opening_a_shard_is_one_range_whatever_becomes_of_it(digits):
    with ImageLoader(
        digits["val"], batch_size=8, training=False, size=32, decode=DecodeConfig(num_threads=1)
    ) as loader:
        found = recorded(lambda: next(iter(loader)))
    assert found["shard"] >= 1
    assert "origin" not in found


def test_nothing_is_recorded_and_nothing_is_left_open_without_a_profiler():
    profiler = StepProfiler()
    with profiler.step(), profiler.stage(Stage.READ):
        assert step_times.open_range(Stage.READ) is None


class Nvtx:
    """What torch tells NVTX, by thread."""

    def __init__(self):
        self.calls = []

    def range_push(self, name):
        self.calls.append((threading.get_ident(), name))

    def range_pop(self):
        self.calls.append((threading.get_ident(), "pop"))


def test_under_an_nvtx_tool_ranges_nest_and_close_though_the_work_fails(monkeypatch):
    nvtx = Nvtx()
    monkeypatch.setattr(step_times, "_IS_UNDER_NVTX_TOOL", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    profiler = StepProfiler()
    with pytest.raises(ValueError, match="bad"), profiler.step(), profiler.stage(Stage.READ):
        raise ValueError("bad")
    with profiler.waiting(Stage.DECODE):
        pass
    names = [name.removeprefix("datasvc.loader.") for _, name in nvtx.calls]
    assert names == ["batch", "read", "pop", "pop", "wait", "pop"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        *(({"DATASVC_NVTX": value}, False) for value in ("", "0", "false", "no", "off", "False ", " NO")),
        *(({"DATASVC_NVTX": value}, True) for value in ("1", "true", "yes", "TRUE")),
        ({"NVTX_INJECTION64_PATH": "/opt/tool.so"}, True),
        ({"NSYS_PROFILING_SESSION_ID": "12"}, True),
    ],
)
@pytest.mark.parametrize("package", [step_times, environment])
def test_a_tool_is_found_by_what_it_sets_in_the_environment(package, environ, expected):
    assert bool(package.is_under_nvtx_tool(environ)) is expected

"""The engine's work in torch's own profiler."""

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from datasvc.trainer.engine.engine import Engine
from datasvc.trainer.engine.execution import timeline
from datasvc.trainer.engine.execution.handles import Handle, Submission
from datasvc.trainer.engine.execution.timeline import profiled
from datasvc.trainer.engine.execution.transport import Transport
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Request
from datasvc.trainer.env.environment import EngineSettings
from tests.trainer.test_engine import submission


def broadcast():
    tensor = torch.ones(3)
    request = Request(name="b", kind=CollectiveKind.BROADCAST, dtypes=("float32",), shapes=((3,),), root_rank=0)
    return Submission(request=request, inputs=(tensor,), outputs=(tensor,), result=tensor, handle=Handle("b"))


def test_a_trace_of_all_threads_shows_what_the_engine_does_with_a_tensor():
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as profiler:
        engine = Engine(Transport(), EngineSettings())
        for each in (submission("x"), broadcast()):
            engine.submit(each)
            each.handle.wait()
        engine.close()
    names = [event.name for event in profiler.events()]
    found = [name.removeprefix("datasvc.engine.") for name in names if name.startswith("datasvc.engine.")]
    assert {"negotiate", "pack", "reduce", "wait", "unpack", "broadcast"} == set(found)


def test_without_a_profiler_no_range_is_made():
    assert profiled("pack") is timeline._NO_RANGE

"""The thread around the state machine, with a network that fails."""

import threading

import pytest
import torch

from datasvc.trainer.engine.engine import Engine
from datasvc.trainer.engine.execution.handles import Handle, Submission
from datasvc.trainer.engine.execution.transport import Transport
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp, Request
from datasvc.trainer.env.environment import EngineSettings
from datasvc.trainer.errors import HorovodInternalError


class FaultyTransport(Transport):
    """Blocks in the collective until told, then fails or not."""

    def __init__(self):
        self.entered, self.go_on, self.is_broken, self.is_closed = (
            threading.Event(),
            threading.Event(),
            False,
            False,
        )

    def begin_allreduce(self, tensor, op, process_set):  # noqa: ARG002 - the transport's signature
        self.entered.set()
        return self

    def wait(self):
        self.go_on.wait()
        if self.is_broken:
            raise RuntimeError("Connection closed by peer")

    def close(self):
        self.is_closed = True


def submission(name):
    tensor = torch.ones(2)
    request = Request(
        name=name, kind=CollectiveKind.ALLREDUCE, dtypes=("float32",), shapes=((2,),), reduce_op=ReduceOp.SUM
    )
    return Submission(request=request, inputs=(tensor,), outputs=(tensor,), result=tensor, handle=Handle(name))


def test_a_broken_network_fails_what_is_in_flight_and_what_comes_later():
    transport = FaultyTransport()
    transport.is_broken = True
    engine = Engine(transport, EngineSettings())
    running, waiting = submission("running"), submission("waiting")
    engine.submit(running)
    transport.entered.wait()
    engine.submit(waiting)
    transport.go_on.set()
    for each in (running, waiting):
        with pytest.raises(HorovodInternalError, match=f"{each.request.name}.*Connection closed by peer"):
            each.handle.wait()
    with pytest.raises(HorovodInternalError, match="'late' cannot run"):
        engine.submit(submission("late"))
    engine.close()
    assert transport.is_closed


def test_a_name_in_flight_is_refused_until_it_is_finished():
    transport = FaultyTransport()
    engine = Engine(transport, EngineSettings())
    first = submission("x")
    engine.submit(first)
    with pytest.raises(ValueError, match="'x' is still in flight"):
        engine.submit(submission("x"))
    transport.go_on.set()
    first.handle.wait()
    engine.submit(submission("x"))
    engine.close()

"""What comes after a collective, in a thread beside the engine's."""

import threading

import pytest
import torch

from datasvc.trainer.engine.execution.handles import Completions
from datasvc.trainer.engine.execution.movements import FusionBuffers
from datasvc.trainer.engine.execution.transport import CompletedWork
from tests.support.gate import Gate


def test_what_began_first_is_completed_first_and_short_ones_wait_their_turn():
    completions, order, gate = Completions(on_error=None), [], Gate()

    def complete(name):
        def after(work):
            work.wait()
            order.append(name)

        return after

    completions.add(CompletedWork(), complete("alone"), is_short=True)
    assert order == ["alone"], "nothing is before it: it is done at once"
    completions.add(gate, complete("long"), is_short=False)
    completions.add(CompletedWork(), complete("short"), is_short=True)
    assert order == ["alone"]
    gate.open()
    completions.drain()
    assert order == ["alone", "long", "short"]
    completions.close()


def test_an_error_is_reported_once_and_later_work_is_discarded():
    errors, told = [], threading.Event()

    def on_error(error):
        errors.append(error)
        told.set()

    completions, gate = Completions(on_error), Gate()

    def fail(work):
        work.wait()
        raise RuntimeError("Connection closed by peer")

    completions.add(gate, fail, is_short=False)
    completions.add(CompletedWork(), lambda _: errors.append("ran"), is_short=False)
    gate.open()
    assert told.wait(30.0)
    completions.drain()
    completions.close()
    assert errors == ["Connection closed by peer"]


def test_a_buffer_in_use_is_not_handed_out_again_and_the_third_waits():
    buffers, kind = FusionBuffers(), (torch.float32, torch.device("cpu"))
    first, second = buffers.take(*kind, 4), buffers.take(*kind, 8)
    assert first.data_ptr() != second.data_ptr()
    got = []
    waiting = threading.Thread(target=lambda: got.append(buffers.take(*kind, 6)))
    waiting.start()
    buffers.give_back(second)
    waiting.join(30.0)
    assert got[0].data_ptr() == second.data_ptr()
    assert got[0].shape == (6,)


def test_a_wait_for_a_buffer_fails_after_a_failure():
    buffers, kind = FusionBuffers(), (torch.float32, torch.device("cpu"))
    taken = [buffers.take(*kind, 4), buffers.take(*kind, 4)]
    buffers.fail("Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        buffers.take(*kind, 4)
    del taken

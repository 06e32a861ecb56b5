"""A worker that cannot connect to the others of its round says so in the end."""

import os
import socket

import pytest
from torch.distributed import TCPStore

from datasvc.trainer.env.environment import EngineSettings, RankPlacement
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.messages import (
    MESSAGE_QUEUE,
    RankAssignment,
    RankRequest,
    ScriptError,
    answer_key,
    decode,
    encode,
)
from datasvc.trainer.rendezvous.rendezvous import Rendezvous
from datasvc.trainer.rendezvous.round import join_round

WORKER = "localhost:0:0"


def test_a_worker_that_can_never_connect_fails_after_some_rounds_with_the_reason(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-card")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = os.dup(listener.fileno())
        store = TCPStore(
            "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
    for number in range(1, 6):
        seat = RankAssignment(number, RankPlacement(0, 2, 0, 2, 0, 1), needs_sync=True, notice=0)
        store.set(answer_key(WORKER, number), encode(seat))
    with pytest.raises(HorovodInternalError, match=r"5 consecutive rounds.*no-such-card"):
        join_round(Rendezvous(WORKER, store.clone()), EngineSettings())
    words = [decode(store.queue_pop(MESSAGE_QUEUE)) for _ in range(6)]
    assert [type(word) for word in words] == [RankRequest] * 5 + [ScriptError]
    assert "no-such-card" in words[-1].text
    assert words[-1].ends_job

"""What a rank reports of a step that lost a connection."""

import threading

import pytest
import torch.distributed as dist

from datasvc.trainer.recipes.layouts import lost_ranks
from datasvc.trainer.recipes.layouts.lost_ranks import LostRankWatch


class LostStore:
    def set(self, key, value):
        raise dist.DistNetworkError(f"cannot set {key} to {value!r}")


@pytest.mark.parametrize(
    ("message", "reported"),
    [("", "a rank failed or was lost (gloo: no route)"), ("rank 2 was lost", "rank 2 was lost")],
)
def test_a_lost_store_does_not_hide_the_error_of_the_step(monkeypatch, message, reported):
    monkeypatch.setattr(lost_ranks, "_get_default_store", LostStore)
    watch = LostRankWatch.__new__(LostRankWatch)  # without its thread, which needs a job
    watch._rank, watch._message, watch._found = 1, message, threading.Event()
    assert reported in str(watch.explain(RuntimeError("gloo: no route")))

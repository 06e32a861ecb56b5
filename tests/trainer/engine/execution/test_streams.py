from unittest import mock

import torch

from datasvc.trainer.engine.execution.movements import EngineStreams


def test_a_device_has_one_stream_however_often_it_is_used(monkeypatch):
    made = mock.Mock()
    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    streams, device = EngineStreams(), torch.device("cuda:0")
    for _ in range(3):
        with streams.on_engine_stream(device, [], []):
            pass
    made.assert_called_once_with(device)

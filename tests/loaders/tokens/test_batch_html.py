import numpy as np
import pytest
import torch

from datasvc.loaders import TokenBatch
from tests.drawing.hostile import parsed, text_of


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_batch_of_tokens_shows_the_first_ones(convert):
    tokens = np.arange(40).reshape(2, 20)
    batch = TokenBatch(
        convert(tokens),
        convert(np.array([20, 0])),
        convert(np.array([True, False])),
        epoch=3,
        positions=np.array([7, 9]),
    )
    shown = text_of(parsed(batch._repr_html_()))
    assert "7 20 0 1 2 3" in shown
    assert "15 …" in shown
    assert shown.endswith("padding")

import random

import numpy as np
import torch

from trainer.recipes import random_state


def test_random_states_go_on_where_they_were():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    random_state.seed_all(3)
    state = random_state.capture()
    first = draw()
    assert draw() != first
    random_state.reinstate(state)
    assert draw() == first
    random_state.seed_all(3)
    assert draw() == first

import random

import numpy as np
import torch

from datasvc.trainer.recipes import random_state


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


def test_every_rank_and_every_step_has_a_seed_of_its_own():
    seeds = [
        random_state.seed_of_rank(seed, rank, step=step, num_applied=num_applied)
        for seed in (-1, 0, 1)
        for rank in range(4)
        for step in (0, 1, 2)
        for num_applied in (0, 1, 2)
    ]
    assert len(set(seeds)) == len(seeds)
    masks = []
    for rank in range(2):
        random_state.seed_all(random_state.seed_of_rank(0, rank))
        masks.append(torch.nn.functional.dropout(torch.ones(64)))
    assert not torch.equal(*masks)

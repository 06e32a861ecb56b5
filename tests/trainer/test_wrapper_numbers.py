"""Names of wrappers are the same on ranks that have made different many before."""

import torch
from torch import nn

import trainer as hvd
from trainer.wrapper_numbers import take_number


class Owner:
    pass


def test_a_number_is_free_again_when_its_owner_is_gone():
    first, second = Owner(), Owner()
    assert [take_number("test", owner) for owner in (first, second)] == [0, 1]
    del first
    third = Owner()
    assert take_number("test", third) == 0
    assert take_number("other", third) == 0
    assert take_number("test", Owner()) == 2


def test_what_was_made_and_dropped_before_does_not_change_names():
    hvd.init()
    model = nn.Linear(2, 2)

    def names():
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
        norms = [hvd.SyncBatchNorm(2) for _ in range(2)]
        return [optimizer._reducer_name for optimizer in optimizers] + [norm._name for norm in norms]

    first = names()
    assert len(set(first)) == 4
    assert names() == first
    hvd.shutdown()

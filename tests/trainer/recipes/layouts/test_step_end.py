"""The end of a step whose round of averaged weights fails."""

from types import SimpleNamespace

import pytest
import torch

from datasvc.trainer.recipes.layouts.step_end import StepEnd


@pytest.mark.parametrize("num_steps", [4, 5])
def test_a_step_that_its_optimizer_has_counted_is_whole_and_the_metrics_of_an_evaluation_before_it_are_not_its_own(
    num_steps,
):
    run = SimpleNamespace(
        model=torch.nn.Linear(1, 1, device="cpu"),
        optimizer=SimpleNamespace(num_steps=4),
        config=SimpleNamespace(averages_weights=True),
        loader=SimpleNamespace(cursor=(0, 0)),
        stop=SimpleNamespace(state_dict=dict),
        metrics={"val_accuracy": 0.5},
        average_statistics={},
        is_updating=False,
    )
    end = StepEnd(run)
    end.note()
    run.is_updating, run.optimizer.num_steps = True, num_steps
    assert end.go_back() == (num_steps == 5)
    assert run.metrics == ({} if num_steps == 5 else {"val_accuracy": 0.5})

"""Metrics of versions, as the frameworks report them."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import datasvc


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_version_of_trainer_has_the_newest_loss_and_the_newest_metrics_of_an_evaluation(tmp_path):
    """huggingface/transformers#8487: the last entry of the history of `Trainer` need not have what is looked for."""
    import transformers

    from datasvc.integrations.transformers import VersionsOfTrainer

    repo, net = datasvc.open(str(tmp_path / "repo"), create=True), torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters())
    parts = {"model": net, "optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd, 1)}
    state, versions = transformers.TrainerState(), VersionsOfTrainer(repo, "net", every=1)
    versions.on_train_begin(SimpleNamespace(), state, None, **parts, train_dataloader=[])
    logged = [
        ({"loss": 3.0}, {"loss": 3.0}),
        (
            {"eval_loss": 4.0, "eval_matrix": [[1]], "eval_runtime": 9.0, "eval_steps_per_second": 9.0},
            {"loss": 3.0, "eval_loss": 4.0},
        ),
        ({"loss": 2.0}, {"loss": 2.0, "eval_loss": 4.0}),
    ]
    for state.global_step, (logs, _) in enumerate(logged, start=1):
        state.log_history.append({**logs, "step": state.global_step})
        versions.on_step_end(None, state, SimpleNamespace(), **parts)
    versions.checkpoints.close()
    entries = [repo.models.restore(str(version)).entry for version in repo.models.versions("net")]
    assert [entry["metrics"] for entry in entries] == [metrics for _, metrics in logged]

"""The checkpoints of torchtitan as versions, in this process; its model is trained in tests/distributed."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import datasvc
from datasvc.errors import ConfigError, NotFoundError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def config():
    from torchtitan.config_manager import JobConfig

    config = JobConfig()
    config.checkpoint.enable_checkpoint, config.checkpoint.interval = True, 3
    config.lr_scheduler.warmup_steps = 0
    return config


def versions_of(repo, config):
    from torchtitan.components.ft import init_ft_manager
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer

    from datasvc.integrations.torchtitan import TitanVersions

    model = torch.nn.Linear(2, 2)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1})
    trainer = SimpleNamespace(
        dataloader=Progress(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=build_lr_schedulers(optimizers, config),
        job_config=config,
        ft_manager=init_ft_manager(config),
    )
    versions = TitanVersions.of(trainer, repo, "llama")
    versions.states["train_state"] = Progress()
    return versions, model


def test_versions_are_saved_at_the_interval_and_loaded_by_their_step(tmp_path, group, config):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    versions, model = versions_of(repo, config)
    assert not versions.load()
    weights = {}
    for step in range(1, 8):
        torch.nn.init.constant_(model.weight, step)
        versions.states["train_state"].step = step
        versions.save(step, force=step == 7)
        weights[step] = model.weight.clone()
    versions.close()
    entries = [repo.repository.entry(version).content for version in repo.models.versions("llama")]
    assert [(entry["step"], entry["parent"]) for entry in entries] == [
        (1, None), (3, "llama@1"), (6, "llama@2"), (7, "llama@3")
    ]  # fmt: skip
    for step, expected in ((-1, 7), (3, 3)):
        again, other = versions_of(repo, config)
        assert again.load(step)
        assert torch.equal(other.weight, weights[expected])
        assert again.states["train_state"].step == expected
    assert again.version == "llama@2"
    with pytest.raises(NotFoundError, match="no version of step 5; it has versions of the steps 1, 3, 6, 7"):
        again.load(5)


def test_what_versions_do_not_do_is_refused(tmp_path, group, config):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    config.checkpoint.initial_load_path = "folder"
    with pytest.raises(ConfigError, match="initial_load_path='folder': load a version with"):
        versions_of(repo, config)
    config.checkpoint.initial_load_path = None
    versions, _ = versions_of(repo, config)
    versions.save(1)
    versions.exclude_from_loading = ["nothing"]
    with pytest.raises(ConfigError, match="exclude_from_loading has 'nothing'; the parts are"):
        versions.load()

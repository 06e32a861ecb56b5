"""The objects of an `Accelerator` as versions, in this process; killed runs are in test_training_programs."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import datasvc
from datasvc.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def prepared():
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = torch.nn.Linear(2, 2)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    return accelerator, {"net": net, "optimizer": optimizer}


def versions_of(*arguments, **options):
    from datasvc.integrations.accelerate import AcceleratorVersions  # slow to import

    return AcceleratorVersions(*arguments, **options)


def step_once(objects):
    objects["net"](torch.ones(1, 2)).sum().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def test_the_objects_of_a_run_are_saved_when_due_and_restored(repo):
    accelerator, objects = prepared()
    with versions_of(accelerator, repo, "net", objects, every=2) as versions:
        assert versions.restore() == 0
        for step in (1, 2, 3):
            step_once(objects)
            versions.step(step, metrics={"loss": torch.tensor(0.5)}, is_last=step == 3)
        drawn = torch.rand(4)
    assert [version.version for version in repo.models.versions("net")] == [1, 2]

    accelerator, others = prepared()
    with versions_of(accelerator, repo, "net", others) as versions:
        assert versions.restore() == 3
        assert torch.equal(torch.rand(4), drawn)
        for name in objects:
            assert str(others[name].state_dict()) == str(objects[name].state_dict())
        step_once(others)
        versions.step(4, is_last=True)
    entry = repo.models.restore("net").entry
    assert (entry["step"], entry["parent"]) == (4, "net@2")
    assert repo.models.restore("net@2").entry["metrics"] == {"loss": 0.5}


def test_a_version_without_one_of_the_objects_is_refused(repo):
    repo.models.save("net", {"model": torch.nn.Linear(2, 2).state_dict()}, step=1)
    with (
        versions_of(*prepared()[:1], repo, "net", prepared()[1]) as versions,
        pytest.raises(ConfigError, match=r"net@1 has no net, optimizer; it has model"),
    ):
        versions.restore()


def test_a_run_that_shards_its_models_is_refused(repo):
    import accelerate

    sharded = SimpleNamespace(distributed_type=accelerate.DistributedType.FSDP)
    with pytest.raises(ConfigError, match="FSDP shards the models"):
        versions_of(sharded, repo, "net", {})

import pytest
import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.trainer.recipes.rejoin import take_newest


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def test_a_state_in_memory_is_taken_unless_the_repository_has_a_later_one(repository):
    net = torch.nn.Linear(3, 2)
    state = hvd.elastic.TorchState(net, step=0)

    def load(checkpoint):
        net.load_state_dict(checkpoint.state["net"])
        state.step = checkpoint.state["step"]

    @hvd.elastic.run
    def begin(state):
        with datasvc.open(repository.url).models.manager("net") as model:
            found = take_newest(state, model, load)
            if not found.step:
                saved = {"net": {name: value * 0 + 5 for name, value in net.state_dict().items()}, "step": 5}
                model.save(saved, step=5)
        return found

    first, second = begin(state), begin(state)
    with torch.no_grad():
        net.weight += 1
    state.restore()
    assert (net.weight == 5).all(), "what was read is what a failure goes back to"
    third = begin(state)
    assert [(found.source, found.step) for found in (first, second, third)] == [
        ("memory", 0),  # there is no version yet
        ("repository", 5),
        ("memory", 5),
    ]
    assert min(found.seconds for found in (first, second, third)) > 0
    assert (net.weight == 5).all()


def test_a_job_without_a_state_continues_from_the_disks_of_the_nodes(repository, tmp_path):
    state = hvd.elastic.ObjectState(step=0)
    options = {"local": tmp_path / "node", "every": 100, "every_local": 1}
    manager = datasvc.open(repository.url).models.manager("net", **options)
    manager.save({"w": torch.ones(3)}, step=5, to="nodes", wait=True)
    manager.__exit__(None, RuntimeError("killed"), None)

    @hvd.elastic.run
    def begin(state):
        manager = datasvc.open(repository.url).models.manager("net", **options)
        found = take_newest(state, manager, lambda checkpoint: setattr(state, "step", checkpoint.entry["step"]))
        manager.__exit__(None, RuntimeError("killed"), None)
        return found.source, found.step

    assert [begin(state), begin(state)] == [("nodes", 5), ("memory", 5)]

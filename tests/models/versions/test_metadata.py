"""What is said of a version is checked before anything is stored, and refused by its name."""

import math

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.models import CheckpointManager, DataUse, restore, save
from datasvc.models.dcp import DcpWriter
from datasvc.models.registry.registry import describe_model
from datasvc.models.versions.metadata import VersionMetadata

STATE = {"w": torch.ones(3)}
NAN = float("nan")
WRONG = [
    ({"step": "7"}, "step is '7'; expected the number of optimizer steps"),
    ({"step": None}, "step is None"),
    ({"step": -1}, "step is -1"),
    ({"step": 1.5}, "step is 1.5"),
    ({"step": True}, "step is True"),
    ({"step": 1 << 70}, "step is 1180591620717411303424"),
    ({"message": 5}, "message is 5"),
    ({"metrics": {"top1": "high"}}, "metric 'top1' is 'high'; expected a number"),
    ({"metrics": {"top1": object()}}, "metric 'top1' is "),
    ({"metrics": {"top1": torch.ones(2)}}, "metric 'top1' is "),
    ({"metrics": [1]}, "metrics are '\\[1\\]'; expected numbers by name"),
    ({"config": [1]}, "config is a list; expected a dict"),
    ({"environment": "x"}, "environment is a str; expected a dict"),
    ({"execution": {"layout": {}}}, "execution is a dict; expected an Execution"),
    ({"data": "imagenet@3"}, "data is 'imagenet@3'; expected a list of DataUse"),
    ({"data": ["imagenet@3"]}, "expected a list of DataUse"),
    ({"data": 3}, "expected a list of DataUse"),
]


@pytest.mark.parametrize(("about", "message"), WRONG, ids=[str(about)[:40] for about, _ in WRONG])
def test_what_cannot_be_said_is_refused_by_its_name_before_anything_is_stored(repository, about, message):
    given = {"step": 1, **about}
    with pytest.raises(ConfigError, match=message):
        save(repository, "m", STATE, **given)
    with pytest.raises(ConfigError, match=message):
        DcpWriter(repository.url, **given)
    if "environment" not in about:
        with CheckpointManager(repository, "m") as model, pytest.raises(ConfigError, match=message):
            model.save(STATE, **given)
    assert repository.names("models") == []


def test_a_config_that_holds_itself_is_refused():
    config = {}
    config["again"] = config
    with pytest.raises(ConfigError, match=r"config.again.again.* is nested deeper than 100 levels"):
        VersionMetadata(1, config=config)


def test_numbers_of_numpy_and_torch_are_numbers(repository):
    about = {
        "step": np.int64(3),
        "metrics": {"a": np.float32(0.5), "b": torch.tensor(2), "c": NAN},
        "config": {"lr": np.float64(0.1), "sizes": (np.int32(1), 2), 7: np.bool_(True)},
    }
    with CheckpointManager(repository, "m") as model:
        versions = [save(repository, "m", STATE, **about), model.save(STATE, **about).result()]
    for version in versions:
        entry = describe_model(repository, str(version)).entry
        assert entry["step"] == 3
        assert entry["metrics"] == {"a": 0.5, "b": 2.0, "c": "nan"}
        assert entry["config"] == {"lr": 0.1, "sizes": [1, 2], "7": True}
    assert type(VersionMetadata(torch.tensor(3)).step) is int
    assert math.isnan(VersionMetadata(1, metrics={"a": NAN}).metrics["a"])
    assert VersionMetadata(1, data=iter([DataUse("d@1", "train", {})])).data == (DataUse("d@1", "train", {}),)


def test_dicts_come_back_in_their_order_and_what_a_save_returned_can_be_restored(repository):
    state = {"z": {"weight": torch.ones(3), "bias": torch.zeros(3)}, "a": [{"y": 1, "b": 2}], 5: 1, "c": {3: 1, 1: 2}}
    version = save(repository, "m", state, step=1)
    found = restore(repository, version).state
    assert list(found) == ["z", "a", 5, "c"]
    assert [list(found["z"]), list(found["a"][0]), list(found["c"])] == [["weight", "bias"], ["y", "b"], [3, 1]]


def test_a_model_that_is_closed_saves_no_more(repository):
    model = CheckpointManager(repository, "m")
    model.save(STATE, step=1)
    model.close()
    with pytest.raises(ConfigError, match="model 'm' is closed; open it again"):
        model.save(STATE, step=2)
    assert repository.living("models", "m") == [1]


def test_nested_tensors_are_refused_by_their_name(repository):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(ConfigError, match=r"tensor 'w' \(nested, float32\) cannot be stored"):
        save(repository, "m", {"w": nested}, step=1)

"""Values in `config=` that are no JSON: a run does not end at its first save because of them."""

import argparse
import dataclasses
import datetime as dt
import enum
import functools
import pathlib
import types
import warnings

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError


class Mode(enum.Enum):
    FAST = 3


@dataclasses.dataclass
class Options:
    rate: float
    more: object = None


@pytest.fixture
def repository(tmp_path):
    return datasvc.open(str(tmp_path), create=True)


@dataclasses.dataclass(slots=True)
class SlottedOptions:
    rate: float


FORMS = [
    (pathlib.Path("/data"), "/data"),
    (argparse.Namespace(lr=0.1, out=pathlib.Path("x")), {"lr": 0.1, "out": "x"}),
    (types.SimpleNamespace(a=1), {"a": 1}),
    (
        functools.partial(torch.optim.SGD, lr=0.1),
        {"function": "torch.optim.sgd.SGD", "args": [], "keywords": {"lr": 0.1}},
    ),
    ({3, 1}, [1, 3]),
    (dt.date(2026, 1, 2), "2026-01-02"),
    (dt.timedelta(1), "1 day, 0:00:00"),
    (float("inf"), "inf"),
    (np.float32("nan"), "nan"),
    (np.int64(3), 3),
    (Mode.FAST, "FAST"),
    (torch.bfloat16, "torch.bfloat16"),
    (torch.device("cpu"), "cpu"),
    (torch.Size([2]), [2]),
    (Options(0.1, Options(0.2)), {"rate": 0.1, "more": {"rate": 0.2, "more": None}}),
    (torch.nn.ReLU, "torch.nn.modules.activation.ReLU"),
    ({None: 1, 2.5: 2, (1, 2): 3}, {"None": 1, "2.5": 2, "(1, 2)": 3}),
    ((1, (2,)), [1, [2]]),
]


@pytest.mark.parametrize(("value", "form"), FORMS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("way", ["save", "manager"])
def test_a_value_that_is_no_json_is_stored_in_a_stated_form(repository, value, form, way):
    """materialyzeai/matgl#802, Lightning-AI/pytorch-lightning#525: a path among the settings ended the training."""
    config = {"a": {"b": [value]}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "save":
            repository.models.save("m", {}, step=1, config=config)
        else:
            with repository.models.manager("m") as model:
                model.save({"w": torch.ones(1)}, step=1, config=config).result()
    assert repository.models.restore("m").entry["config"] == {"a": {"b": [form]}}


def test_what_has_no_form_is_left_out_with_one_warning(repository):
    """Lightning-AI/pytorch-lightning#19573: a loss module among the hyperparameters."""
    config = {"loss": torch.nn.MSELoss(), "lr": 0.1, "list": [torch.ones(1), 1], "raw": b"a"}
    with pytest.warns(RuntimeWarning) as caught:
        repository.models.save("m", {}, step=1, config=config)
    (warning,) = [each for each in caught if "left out" in str(each.message)]
    assert all(text in str(warning.message) for text in ("config.loss", "config.list.0", "config.raw", "ignore="))
    assert repository.models.restore("m").entry["config"] == {"lr": 0.1, "list": [1]}


@pytest.mark.parametrize(
    ("config", "stored"),
    [(argparse.Namespace(lr=0.1), {"lr": 0.1}), (SlottedOptions(0.1), {"rate": 0.1})],
    ids=["namespace", "slots"],
)
def test_a_namespace_or_a_data_class_is_a_configuration(repository, config, stored):
    """samuelcolvin/python-devtools#136: a data class with slots has no `vars`."""
    repository.models.save("m", {}, step=1, config=config)
    assert repository.models.restore("m").entry["config"] == stored
    with pytest.raises(ConfigError, match="config is a list"):
        repository.models.save("m", {}, step=1, config=[1])

import json

import pytest
import torch
from safetensors.torch import load_file

from datasvc.errors import ConfigError
from datasvc.models import restore, save
from datasvc.models.interop.exporting import export_checkpoint


def test_an_exported_checkpoint_is_read_by_safetensors_and_json(repository, tmp_path):
    state = {"model": {"w": torch.randn(3, 4).t()}, "step": 3}
    save(repository, "m", state, step=3, metrics={"acc": 0.5})
    files = export_checkpoint(restore(repository, "m"), tmp_path / "out")
    assert torch.equal(load_file(files[0])["model.w"], state["model"]["w"])
    assert json.loads(files[1].read_text()) == {"model": {"w": {"$tensor": "model.w"}}, "step": 3}
    assert json.loads(files[2].read_text())["metrics"] == {"acc": 0.5}


def test_nothing_is_overwritten(repository, tmp_path):
    save(repository, "m", {}, step=0)
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        export_checkpoint(restore(repository, "m"), tmp_path)
    with pytest.raises(ConfigError, match="cannot write"):
        export_checkpoint(restore(repository, "m"), tmp_path / "mine")

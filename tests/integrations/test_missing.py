import importlib
import sys

import pytest

import datasvc
from datasvc.errors import ConfigError, MissingPackageError


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("lightning", "lightning"),
        ("transformers", "transformers"),
        ("accelerate", "accelerate"),
        ("torchdata", "torchdata"),
        ("torchtitan", "torchtitan"),
        ("ray_data", "ray"),
        ("ray_train", "ray"),
        ("ray_executor", "ray"),
        ("jax", "jax"),
        ("keras", "keras"),
        ("hub", "hub"),
        ("mlflow", "mlflow"),
        ("wandb", "wandb"),
    ],
)
def test_an_integration_without_its_package_names_the_extra(module, extra, monkeypatch):
    name = f"datasvc.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    package = {"hub": "huggingface_hub"}.get(module, module.partition("_")[0])
    for loaded in [other for other in sys.modules if other.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"^{name} needs {package}, .* pip install '\.\[{extra}\]'$"):
        importlib.import_module(name)


def test_versions_on_the_disks_of_nodes_are_refused(repository):
    from datasvc.integrations.run_checkpoints import RunCheckpoints

    with pytest.raises(ConfigError, match="local= is not for the adapters"):
        RunCheckpoints(datasvc.open(repository.url), "m", local="/nvme")

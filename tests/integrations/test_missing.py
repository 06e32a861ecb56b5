import importlib
import sys

import pytest

from datasvc.errors import MissingPackageError


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("lightning", "lightning"),
        ("transformers", "transformers"),
        ("accelerate", "accelerate"),
        ("torchdata", "torchdata"),
        ("mlflow", "mlflow"),
        ("wandb", "wandb"),
    ],
)
def test_an_integration_without_its_package_names_the_extra(module, extra, monkeypatch):
    name = f"datasvc.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [other for other in sys.modules if other.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"^{name} needs {module}, .* pip install '\.\[{extra}\]'$"):
        importlib.import_module(name)

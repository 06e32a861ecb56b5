"""The package name ``horovod`` for the trainer: ``import horovod.torch as hvd`` is ``import datasvc.trainer as hvd``.

Each module below is the trainer's own, not a copy: the class of an exception that one raises is that which the other
catches. Modules of Horovod that are not in the table cannot be imported, and say so.
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_MODULES = {
    "horovod.torch": "datasvc.trainer",
    "horovod.torch.compression": "datasvc.trainer.compression",
    "horovod.torch.elastic": "datasvc.trainer.elastic",
    "horovod.torch.elastic.sampler": "datasvc.trainer.elastic.sampler",
    "horovod.torch.elastic.state": "datasvc.trainer.elastic.state",
    "horovod.torch.functions": "datasvc.trainer.functions",
    "horovod.torch.mpi_ops": "datasvc.trainer.mpi_ops",
    "horovod.torch.optimizer": "datasvc.trainer.optimizer",
    "horovod.torch.sync_batch_norm": "datasvc.trainer.sync_batch_norm",
    "horovod.common": "datasvc.trainer.common",
    "horovod.common.basics": "datasvc.trainer.common.basics",
    "horovod.common.elastic": "datasvc.trainer.common.elastic",
    "horovod.common.exceptions": "datasvc.trainer.common.exceptions",
    "horovod.common.process_sets": "datasvc.trainer.common.process_sets",
    "horovod.common.util": "datasvc.trainer.common.util",
    "horovod.runner": "datasvc.trainer.runner",
    "horovod.runner.launch": "datasvc.trainer.runner.launch",
    "horovod.ray": "datasvc.integrations.ray_executor",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table, and nothing else, below ``horovod``."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib's signature, as the next
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        # Those that are missing too: another finder would load a second copy of trainer/X.py as horovod.torch.X. They
        # fail when they are loaded, so that a program may look for them by importlib.util.find_spec.
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        _check_name(spec.name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        # In place of the new, empty module, which importlib drops then.
        sys.modules[module.__name__] = importlib.import_module(_MODULES[module.__name__])

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m horovod.runner.launch``."""
        _check_name(fullname)
        spec = importlib.util.find_spec(_MODULES[fullname])
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        return spec.loader.get_code(spec.name)


def _check_name(fullname: str) -> None:
    if fullname not in _MODULES:
        raise ModuleNotFoundError(
            f"there is no {fullname} here: this horovod is datasvc's trainer, with Horovod's part for PyTorch: "
            f"{', '.join(_MODULES)}",
            name=fullname,
        )


def _check_alone() -> None:
    """Raises ImportError: the real Horovod is installed as well, or the trainer is not."""
    for found in importlib.metadata.distributions(name="horovod"):
        raise ImportError(
            f"two packages are imported as horovod: Horovod {found.version} in {found.locate_file('')}, and "
            f"datasvc-horovod, {__file__}; remove one: pip uninstall datasvc-horovod, or pip uninstall horovod"
        )
    if importlib.util.find_spec("datasvc") is None:
        raise ImportError(
            f"{__file__} gives datasvc's trainer the name horovod, but there is no trainer: install datasvc"
        )


def __getattr__(name: str) -> Any:
    # Nothing is loaded before it is used: `import horovod` alone does not need torch, nor the launcher.
    if name == "run":
        return importlib.import_module("datasvc.trainer.runner").run
    if name == "__version__":
        return importlib.import_module("datasvc.trainer").__version__
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")


_check_alone()
__path__: list[str] = []  # that makes it a package to importlib: it has modules below it
sys.meta_path.insert(0, _Finder())

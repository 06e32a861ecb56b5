"""The capabilities of this installation, in the format of `horovodrun --check-build`, and how to add missing ones."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass

_TORCH_BUILDS = "https://pytorch.org/get-started/locally"
# Libraries for tensor operations that only Horovod can use.
_FOREIGN_OPERATIONS = ("MPI", "CCL", "DDL")


@dataclass(frozen=True)
class BuildFeature:
    """A feature that an installation may have.

    Attributes:
        name: name in the table.
        is_available: whether this installation has the feature.
        advice: text for a feature that is not available: what it is for, or how to install it.
    """

    name: str
    is_available: bool
    advice: str = ""


def describe_build() -> str:
    """Return a table of the available frameworks, launchers and tensor operations. Imports torch if it is installed.

    Below the table, each feature that is not available has a line with its advice.
    """
    frameworks, has_distributed, operations = _list_torch_features()
    features_by_title = {
        "Frameworks": frameworks,
        # srun and mpirun need nothing in this installation: `init` reads the variables that they set.
        "Launchers": [
            BuildFeature("this one", True),
            BuildFeature("torchrun", has_distributed, "comes with PyTorch"),
            BuildFeature("srun", True),
            BuildFeature("mpirun", True),
        ],
        "Tensor operations": [
            *operations,
            *(
                BuildFeature(name, False, "exists in Horovod only; Gloo and NCCL replace it")
                for name in _FOREIGN_OPERATIONS
            ),
        ],
    }
    # The table has the rows of Horovod's table. These features, which only some jobs need, are listed if missing.
    others = [
        BuildFeature(
            "ssh", shutil.which("ssh") is not None, "starts ranks on other hosts; install an OpenSSH client"
        ),
        BuildFeature(
            "PyYAML", importlib.util.find_spec("yaml") is not None, "reads --config-file in YAML; pip install pyyaml"
        ),
    ]
    sections = [
        [f"{title}:", *(f"    [{'X' if feature.is_available else ' '}] {feature.name}" for feature in features)]
        for title, features in features_by_title.items()
    ]
    features = [*(feature for group in features_by_title.values() for feature in group), *others]
    missing = [f"    {feature.name}: {feature.advice}" for feature in features if not feature.is_available]
    return "\n\n".join("\n".join(lines) for lines in [*sections, ["Not available:", *missing]])


def _list_torch_features() -> tuple[list[BuildFeature], bool, list[BuildFeature]]:
    """Return the frameworks, whether torch.distributed is available, and the operations that torch has."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        advice = f"cannot be imported ({error}); pip install torch, see {_TORCH_BUILDS}"
        names = ("Gloo", "NCCL", "CUDA")
        return (
            [BuildFeature("PyTorch", False, advice)],
            False,
            [BuildFeature(name, False, "needs PyTorch") for name in names],
        )
    has_distributed = dist.is_available()
    cuda_advice = "torch finds no GPU; check nvidia-smi and the driver"
    if torch.version.cuda is None and torch.version.hip is None:
        cuda_advice = f"this build of torch is for CPUs; for GPUs install another one, see {_TORCH_BUILDS}"
    build_advice = f"this build of torch lacks it; install another one, see {_TORCH_BUILDS}"
    operations = [
        BuildFeature("Gloo", has_distributed and dist.is_gloo_available(), build_advice),
        BuildFeature("NCCL", has_distributed and dist.is_nccl_available(), f"for GPUs; {build_advice}"),
        BuildFeature("CUDA", torch.cuda.is_available(), cuda_advice),
    ]
    return [BuildFeature("PyTorch " + torch.__version__, True)], has_distributed, operations

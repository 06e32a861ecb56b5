"""Optional packages, and the commands that install them, for error messages.

The commands install the packages and not the extras of datasvc, because datasvc may not be on a package index.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

# A copy of the extras in pyproject.toml; a test checks that both are equal.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("s3fs>=2025.3",),
    "gcs": ("gcsfs>=2025.3",),
    "azure": ("adlfs>=2024.12",),
    "hub": ("huggingface_hub>=0.30",),
    "yaml": ("pyyaml>=6",),
    "tensorboard": ("tensorboard>=2.16",),
    "wandb": ("wandb>=0.17",),
    "mlflow": ("mlflow>=2.14",),
    "text": ("tokenizers>=0.21",),
    "sign": ("cryptography>=43",),
    "onnx": ("onnx>=1.18", "onnxscript>=0.5"),
    "ray": ("ray>=2.40",),
    "ui": ("jinja2>=3.1",),
    "pandas": ("pandas>=2.2",),
    "plot": ("matplotlib>=3.9",),
    "demo": ("scikit-learn>=1.6",),
    "docs": ("zensical>=0.0.73", "mkdocstrings-python>=2"),
}
_EXTRA_OF_SCHEME: Final = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
    "hf": "hub",
}


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, as text for the end of an error message."""
    packages = shlex.join(EXTRAS[extra])
    return f"pip install {packages}, or in the source folder of datasvc: pip install '.[{extra}]'"


def how_to_install_driver(url: str) -> str:
    """Return the command that installs the driver for a URL; for a store without an extra, return general advice."""
    extra = _EXTRA_OF_SCHEME.get(url.partition("://")[0])
    return how_to_install(extra) if extra is not None else "install its driver for fsspec"

"""What datasvc needs: its own packages, those of its extras, and the errors that name a missing extra.

The commands in messages install the packages and not the extras of datasvc, because datasvc may not be on a package
index.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from datasvc.errors import MissingPackageError

# Copies of the dependencies and extras in pyproject.toml; a test checks that they are equal.
CORE: Final = (
    "pyarrow>=21",
    "fsspec>=2025.9",
    "obstore>=0.12",
    "lmdb>=1.6",
    "zstandard>=0.23",
    "blake3>=1.0",
    "xxhash>=3.2",
    "tenacity>=9",
    "numpy>=2.0",
    "pillow>=11",
    "google-crc32c>=1.7",
    "aiohttp>=3.12",
    "prometheus-client>=0.23",
    "safetensors>=0.7",
    "typer>=0.19",
    "rich>=14.3",
)
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": ("torch>=2.11",),
    "images": ("nvidia-nvimgcodec-cu13>=0.9,<0.10; sys_platform == 'linux'", "simplejpeg>=1.8"),
    "gpu": ("datasvc[torch,images]", "nvidia-dali-cuda130>=2.4,<3; sys_platform == 'linux'"),
    "gpu-cu12": (
        "datasvc[torch]",
        "nvidia-dali-cuda120>=2.4,<3; sys_platform == 'linux'",
        "nvidia-nvimgcodec-cu12>=0.9,<0.10; sys_platform == 'linux'",
        "simplejpeg>=1.8",
    ),
    "train": ("datasvc[torch,yaml]", "cloudpickle>=3"),
    "s3": ("s3fs>=2025.9",),
    "gcs": ("gcsfs>=2025.9",),
    "azure": ("adlfs>=2024.12",),
    "sql": ("duckdb>=2.0",),
    "hub": ("huggingface_hub>=2.0",),
    "yaml": ("pyyaml>=6",),
    "tensorboard": ("tensorboard>=2.18",),
    "wandb": ("wandb>=0.18",),
    "mlflow": ("mlflow-skinny>=3.2", "sqlalchemy>=2.0", "alembic>=1.13"),
    "lightning": ("lightning>=2.6",),
    "accelerate": ("accelerate>=1.7",),
    "transformers": ("datasvc[accelerate]", "transformers>=5.18"),
    "torchdata": ("torchdata>=0.11",),
    "torchtitan": ("torchtitan>=0.3",),
    "jax": ("jax>=0.6",),
    "keras": ("keras>=3.8",),
    "audio": ("soundfile>=0.13",),
    "heic": ("pi-heif>=1.0",),
    "text": ("tokenizers>=0.23.3",),
    "video": ("av>=17",),
    "sign": ("cryptography>=43",),
    "onnx": ("onnx>=1.18", "onnxscript>=0.7"),
    "ray": ("ray[data,train]>=2.50",),
    "search": ("optuna>=4.9",),
    "ui": ("datasvc[sql]", "jinja2>=3.1"),
    "pandas": ("pandas>=2.2",),
    "plot": ("matplotlib>=3.9",),
    "demo": ("scikit-learn>=1.6",),
    "all": (
        "datasvc[train,gpu,sql,s3,gcs,azure,hub,audio,heic,text,ray,ui,sign,onnx,pandas,plot,tensorboard,wandb,mlflow]",
        "datasvc[video,lightning,transformers,torchdata,jax,keras,search]",
    ),
    "docs": ("zensical>=0.0.73", "mkdocstrings-python>=2"),
}
PURPOSES: Final[Mapping[str, str]] = {
    "torch": "checkpoints as tensors, and batches of loaders as tensors",
    "images": "fast decoding of images on the CPU, and `ingest --decode-check` for JPEG",
    "gpu": "decoding of images on a GPU with CUDA 13",
    "gpu-cu12": "decoding of images on a GPU with CUDA 12, instead of `images` and `gpu`",
    "train": "`datasvc train`, `datasvc-run` and `datasvc.trainer`",
    "s3": "sources on S3, and more kinds of credentials for repositories there",
    "gcs": "sources on Google Cloud Storage, and more kinds of credentials for repositories there",
    "azure": "sources on Azure, and more kinds of credentials for repositories there",
    "sql": "`sql`, `delete --where`, `models sql` and `models find`",
    "hub": "sources on the Hugging Face Hub",
    "yaml": "configuration files in YAML",
    "tensorboard": "curves of trainings in TensorBoard",
    "wandb": "curves of trainings in Weights & Biases, `datasvc.integrations.wandb`",
    "mlflow": "curves of trainings in MLflow, `datasvc.integrations.mlflow`",
    "lightning": "`datasvc.integrations.lightning`",
    "accelerate": "`datasvc.integrations.accelerate`",
    "transformers": "`datasvc.integrations.transformers`",
    "torchdata": "`datasvc.integrations.torchdata`",
    "torchtitan": "`datasvc.integrations.torchtitan`",
    "jax": "`datasvc.integrations.jax`",
    "keras": "`datasvc.integrations.keras`",
    "audio": "`ingest` and decoding of sounds",
    "heic": "`ingest` of HEIC photos, which are stored as JPEG",
    "text": "text to token blocks with a `tokenizer.json`",
    "video": "`ingest` and decoding of videos",
    "sign": "signatures of model versions",
    "onnx": "`models export --format onnx`",
    "ray": "`ingest --engine ray` over many machines, `datasvc.integrations.ray_data` and other modules for Ray",
    "search": "searches for settings with Optuna, `examples/search_optuna.py`",
    "ui": "`datasvc ui`, the pages in the browser",
    "pandas": "tables as data frames in notebooks",
    "plot": "plots in notebooks",
    "demo": "the images of the demo",
    "all": "all of the above but `gpu-cu12`, `torchtitan` and `demo`",
    "docs": "`make docs`",
}
_EXTRA_OF_SCHEME: Final = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
    "hf": "hub",
}
# Top-level modules, and the extra that has each; those whose importers raise errors of their own are left out.
_EXTRA_OF_MODULE: Final = {
    "torch": "torch",
    "nvidia": "gpu",
    "simplejpeg": "images",
    "soundfile": "audio",
    "av": "video",
    "cloudpickle": "train",
    "jinja2": "ui",
    "duckdb": "sql",
    "yaml": "yaml",
    **{name: name for name in ("accelerate", "jax", "keras", "lightning", "mlflow", "ray", "torchdata")},
    **{name: name for name in ("torchtitan", "transformers", "wandb")},
    "huggingface_hub": "hub",
}


def packages_of(extra: str) -> tuple[str, ...]:
    """Return the requirements of an extra, with those of the extras that it includes, and without markers."""
    packages: list[str] = []
    for requirement in EXTRAS[extra]:
        included = re.fullmatch(r"datasvc\[(.+)\]", requirement)
        if included:
            packages += [package for name in included[1].split(",") for package in packages_of(name)]
        else:
            packages.append(requirement.partition(";")[0])
    return tuple(dict.fromkeys(packages))


def quote_packages(packages: Sequence[str]) -> str:
    """Return requirements as words of a shell."""
    return shlex.join(packages)


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, as text for the end of an error message."""
    packages = quote_packages(packages_of(extra))
    return f"pip install {packages}, or in the source folder of datasvc: pip install '.[{extra}]'"


def how_to_install_driver(url: str) -> str:
    """Return the command that installs the driver for a URL; for a store without an extra, return general advice."""
    extra = _EXTRA_OF_SCHEME.get(url.partition("://")[0])
    return how_to_install(extra) if extra is not None else "install its driver for fsspec"


def missing_package(error: ImportError, feature: str) -> MissingPackageError | None:
    """Return the error that names the extra of a module which cannot be imported; None if no extra has it.

    Args:
        error: error of the import.
        feature: what needs the module, as the subject of the message.
    """
    module = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF_MODULE.get(module)
    if not isinstance(error, ModuleNotFoundError) or extra is None:
        return None  # an installed package that cannot be imported has another reason, which its error says
    message = f"{feature} needs {module}, which is not installed: {how_to_install(extra)}"
    return MissingPackageError(message, name=error.name)


@contextmanager
def explain_missing(feature: str) -> Iterator[None]:
    """Replace the error of an import inside the block by one that names the extra, if an extra has the module.

    Args:
        feature: what needs the module, as the subject of the message.

    Raises:
        MissingPackageError: a package of an extra is not installed.
    """
    try:
        yield
    except MissingPackageError:
        raise  # it names a feature that is nearer
    except ModuleNotFoundError as error:
        missing = missing_package(error, feature)
        if missing is None:
            raise
        raise missing from error

"""The packages that pyproject.toml names are those that the code imports."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from datasvc.extras import CORE, EXTRAS, packages_of
from tests.test_imports import FILES, ROOT, imports

# The package of each top-level module that has another name.
PACKAGES = {
    "PIL": "pillow",
    "google_crc32c": "google-crc32c",
    "mlflow": "mlflow-skinny",
    "nvidia.dali": "nvidia-dali-cuda130",
    "nvidia": "nvidia-nvimgcodec-cu13",
    "pi_heif": "pi-heif",
    "prometheus_client": "prometheus-client",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
# Not imported by name: drivers that fsspec finds, what MLflow needs besides, and programs.
BY_NAME = {
    "s3fs",
    "gcsfs",
    "adlfs",
    "huggingface_hub",
    "tensorboard",
    "zensical",
    "mkdocstrings-python",
    "alembic",
    "sqlalchemy",
}
# For another CUDA, with the same modules; the images of the demo, which tools/ import; what `onnx` exports with; what
# examples/ import.
ELSEWHERE = {"nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12", "scikit-learn", "onnx", "onnxscript", "optuna"}
# Dependencies of packages that we name: markupsafe of jinja2.
INDIRECT = {"markupsafe"}


def name_of(requirement):
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@functools.cache
def imported():
    """Return the foreign modules that our files import: top-level, but those of NVIDIA with their second part."""
    found = set()
    for path in FILES:
        for name in imports(path):
            parts = name.split(".")
            top = ".".join(parts[:2]) if parts[0] == "nvidia" else parts[0]
            if top not in {"datasvc", "__main__", *sys.stdlib_module_names}:
                found.add(top)
    return found


NEEDED = {name_of(requirement) for requirement in CORE}
OF_EXTRAS = {name_of(package) for extra in EXTRAS for package in packages_of(extra)}


def test_every_foreign_module_is_of_a_package_that_the_project_names():
    packages = {PACKAGES.get(module, module) for module in imported()}
    assert packages - NEEDED - OF_EXTRAS - INDIRECT == set()


def test_every_package_that_the_project_names_is_imported():
    packages = {PACKAGES.get(module, module) for module in imported()}
    assert NEEDED - packages == set()
    assert OF_EXTRAS - packages - BY_NAME - ELSEWHERE == set()


def test_the_core_imports_modules_of_extras_only_where_they_are_used():
    """At the top of a module, such an import would fail wherever the module is imported."""
    core = {*(PACKAGES.get(module, module) for module in imported())} & NEEDED
    assert {"numpy", "pyarrow"} <= core
    allowed = ("datasvc.models.dcp", "datasvc.trainer", "datasvc.loaders.torch", "datasvc.ui", "datasvc.integrations")
    wrong = []
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = module if module.startswith("datasvc.") else f"datasvc.{module}"
        wrong += [
            f"{module} imports {name}"
            for name in top_imports(path)
            if PACKAGES.get(name, name) in OF_EXTRAS - NEEDED and not module.startswith((*allowed, *LAZY))
        ]
    assert wrong == []


# Imported by other modules inside functions only.
LAZY = ("datasvc.models.interop.torch_child", "datasvc.models.interop.pickled_values")


def top_imports(path):
    """Return the top-level modules that a file imports when it is imported itself."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("group", ["core", "extras"])
def test_every_requirement_has_a_lower_limit(group):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: packages for name, packages in declared["optional-dependencies"].items() if name != "dev"}
    listed = (
        declared["dependencies"] if group == "core" else [each for packages in extras.values() for each in packages]
    )
    assert [each for each in listed if ">=" not in each and not each.startswith("datasvc[")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "extras", [[*sorted({*EXTRAS} - {"gpu-cu12", "torchtitan"}), "dev"], ["gpu-cu12"]], ids=["all", "cuda12"]
)
def test_the_extras_can_be_installed_with_the_constraints(extras, index):
    """All of them together, and so each; both CUDAs are never together."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed")
    words = [uv, "pip", "compile", "--quiet", "--python", sys.executable, "--constraint", ROOT / "constraints.txt"]
    words += [f"--extra={extra}" for extra in extras]
    done = subprocess.run([*words, ROOT / "pyproject.toml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

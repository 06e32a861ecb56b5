"""Writes the reference of the Python API: a page for the facade, and one for each package, for mkdocstrings to fill.

What is public is what the `__all__` of a package lists, and the classes that `CLASSES` names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasvc.api import Datasets, Models, Runs
from datasvc.api.operation import Operation

PACKAGES = (
    "datasvc",
    "datasvc.shards",
    "datasvc.cache",
    "datasvc.loaders",
    "datasvc.loaders.torch",
    "datasvc.models",
    "datasvc.models.dcp",
    "datasvc.runs",
    "datasvc.trainer",
    "datasvc.trainer.elastic",
    "datasvc.testing",
)
INTEGRATIONS = "datasvc.integrations"
# Public classes of modules that their package does not import, because it would make every import slower.
CLASSES = {"datasvc.node.client": ("NodeClient",)}
_FACADE = """# repo.datasets, repo.models, repo.runs

`repo = datasvc.open(url)` returns a repository. Most of its methods are functions of the library whose first
parameter is the repository; leave this parameter out in a call: `repo.datasets.ingest(source, name)`."""


def write_python_api(folder: Path) -> None:
    """Write the pages `api-facade.md` and `api-PACKAGE.md` to `folder`."""
    facade = [_FACADE]
    for name, owner in (("repo.datasets", Datasets), ("repo.models", Models), ("repo.runs", Runs)):
        facade += [f"## {name}", *(_directive(path, f"{name}.{method}") for method, path in _methods(owner))]
    (folder / "api-facade.md").write_text("\n\n".join(facade) + "\n", encoding="utf-8")
    for module_name in (*PACKAGES, *CLASSES):
        module = importlib.import_module(module_name)
        names = CLASSES.get(module_name) or [name for name in module.__all__ if name != "__version__"]
        sections = [f"# {module_name}", inspect.getdoc(module) or ""]
        sections += [_directive(f"{module_name}.{name}", name, level=2) for name in names]
        page = folder / f"api-{module_name.replace('.', '-')}.md"
        page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")

    sections = [f"# {INTEGRATIONS}", inspect.getdoc(importlib.import_module(INTEGRATIONS)) or ""]
    for module, (doc, nodes) in read_integrations().items():
        sections += [f"## {INTEGRATIONS}.{module}", doc]
        sections += [_directive(f"{INTEGRATIONS}.{module}.{name}", name) for name in nodes]
    (folder / f"api-{INTEGRATIONS.replace('.', '-')}.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def read_integrations() -> dict[str, tuple[str, dict[str, ast.ClassDef | ast.FunctionDef]]]:
    """Return for each module of `datasvc.integrations` with public names its docstring and the definitions by name.

    They are read from the source: a module can be imported only where its framework is installed.
    """
    found = {}
    for path in sorted(Path(importlib.import_module(INTEGRATIONS).__path__[0]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
                found[path.stem] = (ast.get_docstring(tree) or "", {name: defined[name] for name in names})
    return found


def _methods(owner: type) -> Iterator[tuple[str, str]]:
    """Give the public methods of a facade, each with the full name of the function that documents it."""
    for name in sorted(name for name in dir(owner) if not name.startswith("_")):
        static: Any = inspect.getattr_static(owner, name)
        function = static.function if isinstance(static, Operation) else static
        if callable(function):
            yield name, f"{function.__module__}.{function.__qualname__}"


def _directive(path: str, heading: str, *, level: int = 3) -> str:
    options = [f"heading: {heading}", f"toc_label: {heading}", f"heading_level: {level}"]
    return "\n      ".join([f"::: {path}\n    options:", *options])

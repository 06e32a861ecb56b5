"""Every value that says it is shown has its functions in `datasvc.views`, and a class of a user inherits them."""

import importlib
import inspect
import subprocess
import sys

from datasvc.models.registry.registry import ModelVersions
from datasvc.shown import Shown, ShownTable
from datasvc.views import RENDERERS, find_renderer
from tests.test_imports import MODULES, ROOT

SHOWING = [module for module, path in MODULES.items() if "datasvc.shown import" in path.read_text(encoding="utf-8")]


def shown_classes():
    for module in SHOWING:
        for value in vars(importlib.import_module(module)).values():
            if inspect.isclass(value) and issubclass(value, Shown) and value not in {Shown, ShownTable}:
                yield value


def test_each_class_has_its_renderers_and_each_renderer_its_class():
    classes = set(shown_classes())
    assert {value.__name__ for value in classes} == set(RENDERERS["html"])
    for value in classes:
        for way in ("html", *(["plot"] if hasattr(value, "plot") else [])):
            parameter = next(iter(inspect.signature(find_renderer(value, way)).parameters.values()))
            assert parameter.annotation.partition("[")[0] in {base.__name__ for base in value.__mro__} | {
                "Sequence",
                "Iterable",
            }
    assert set(RENDERERS["plot"]) == {value.__name__ for value in classes if hasattr(value, "plot")}


def test_a_class_that_a_user_derives_is_shown_in_the_same_way():
    class Report(ModelVersions):
        pass

    assert "none" in Report()._repr_html_()


def test_importing_a_value_imports_no_picture():
    code = (
        "import sys, datasvc.api, datasvc.loaders, datasvc.runs\n"
        "print([name for name in sys.modules if name.startswith(('datasvc.views', 'datasvc.drawing'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"

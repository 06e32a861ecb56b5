import ast
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from datasvc.errors import ConfigError, MissingPackageError
from datasvc.extras import CORE, EXTRAS, explain_missing, how_to_install, how_to_install_driver, packages_of
from datasvc.repository.store.storage import resolve_url
from tests.support.pages import find_page

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("datasvc", "trainer", "loaders", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
]
GUIDES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]


def test_the_packages_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(CORE) == project["dependencies"]
    declared = project["optional-dependencies"]
    del declared["dev"]
    assert {name: list(packages) for name, packages in EXTRAS.items()} == declared


def test_the_page_on_installing_lists_every_extra():
    rows = re.findall(r"^\| (`.+?`) \|", find_page("install.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == {*EXTRAS, "dev"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_to_type_names_packages_that_an_index_has(extra):
    said = how_to_install(extra)
    for package in packages_of(extra):
        assert package in shlex.split(said.partition(", or")[0])
    assert f"pip install '.[{extra}]'" in said
    assert "datasvc[" not in said


def test_every_extra_that_a_message_asks_for_exists():
    asked = {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "how_to_install"
        if isinstance(node.args[0], ast.Constant)
    }
    assert {"onnx", "sign", "ray", "text", "gpu", "images"} <= asked <= EXTRAS.keys()


def test_no_message_installs_datasvc_from_an_index():
    for path in [*SOURCES, *GUIDES]:
        text = path.read_text()
        assert re.findall(r"pip install[^\n`]*?['\" ]datasvc(?:\[[\w,-]+\])?['\"\s`]", text) == [], path
        for extras in re.findall(r"\.\[([\w,-]+)\]'", text):
            assert set(extras.split(",")) <= {*EXTRAS, "dev"}, path


@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://b/k", "s3fs"), ("gs://b/k", "gcsfs"), ("abfs://b/k", "adlfs"), ("hf://b/k", "huggingface_hub")],
)
def test_the_error_of_a_missing_driver_has_the_packages_to_install(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    with pytest.raises(ConfigError, match=rf"pip install '{package}>="):
        resolve_url(url)


def test_the_driver_of_another_store_is_left_to_its_users():
    assert how_to_install_driver("hdfs://x/y") == "install its driver for fsspec"


def test_an_extra_has_the_packages_of_those_that_it_includes():
    assert set(packages_of("train")) == {*EXTRAS["torch"], *EXTRAS["yaml"], "cloudpickle>=3"}
    assert {"torch>=2.11", "s3fs>=2025.9", "nvidia-dali-cuda130>=2.4,<3"} < set(packages_of("all"))
    every = {package for extra in EXTRAS for package in packages_of(extra)}
    others = {package for extra in ("gpu-cu12", "torchtitan", "demo", "docs") for package in packages_of(extra)}
    assert every - set(packages_of("all")) == others - set(packages_of("all"))


def test_what_needs_a_missing_package_names_its_extra_and_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with (
        pytest.raises(
            MissingPackageError, match=r"^this check needs simplejpeg, .* pip install '\.\[images\]'$"
        ) as caught,
        explain_missing("the command"),
        explain_missing("this check"),
    ):
        import simplejpeg  # noqa: F401
    assert isinstance(caught.value, ModuleNotFoundError)
    assert (caught.value.name, caught.value.exit_code) == ("simplejpeg", 2)


@pytest.mark.parametrize("module", ["tests.no_such_module", "numpy.no_such_module"])
def test_the_error_of_another_import_is_not_changed(module):
    with pytest.raises(ModuleNotFoundError) as caught, explain_missing("this"):
        importlib.import_module(module)
    assert not isinstance(caught.value, MissingPackageError)

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from datasvc.errors import ConfigError
from datasvc.extras import EXTRAS, how_to_install, how_to_install_driver
from datasvc.repository.store.storage import resolve_url
from tests.pages import find_page

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("datasvc", "trainer", "loaders", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
]
GUIDES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]


def test_the_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del declared["dev"]
    assert {name: list(packages) for name, packages in EXTRAS.items()} == declared


def test_the_page_on_installing_lists_every_extra():
    rows = re.findall(r"^\| (`.+?`) \|", find_page("install.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*EXTRAS, "dev"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_to_type_names_packages_that_an_index_has(extra):
    said = how_to_install(extra)
    for package in EXTRAS[extra]:
        assert f"'{package}'" in said
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
    assert {"onnx", "sign", "ray", "text"} <= asked <= EXTRAS.keys()


def test_nothing_tells_to_install_datasvc_from_an_index():
    for path in [*SOURCES, *GUIDES]:
        text = path.read_text()
        assert re.findall(r"pip install[^\n`]*?['\" ]datasvc(?:\[\w+\])?['\"\s`]", text) == [], path
        for extras in re.findall(r"\.\[([\w,]+)\]'", text):
            assert set(extras.split(",")) <= {*EXTRAS, "dev"}, path


@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://b/k", "s3fs"), ("gs://b/k", "gcsfs"), ("abfs://b/k", "adlfs"), ("hf://b/k", "huggingface_hub")],
)
def test_a_store_without_its_driver_says_what_to_install(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    with pytest.raises(ConfigError, match=rf"pip install '{package}>="):
        resolve_url(url)


def test_the_driver_of_another_store_is_left_to_its_users():
    assert how_to_install_driver("hdfs://x/y") == "install its driver for fsspec"

"""The book: what differs from the pages in `docs/`, what is generated, and that it needs no network."""

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import typer

from datasvc import api
from datasvc.api import DataRepository
from datasvc.cli.main import make_app
from tests.support.pages import DOCS, ROOT, all_pages
from tests.test_public_names import PACKAGES as PUBLIC_PACKAGES
from tools.book.__main__ import add_to_navigation
from tools.book.command_line import write_commands
from tools.book.pages import indent_lists, write_pages
from tools.book.python_api import CLASSES, PACKAGES, write_python_api

FENCED = re.compile(r"^( *)```.*?^ *```$", re.MULTILINE | re.DOTALL)


def test_lists_and_their_code_are_indented_as_the_site_needs_them():
    page = "- a\n  b\n  - c\n\n  ```sh\n  x\n    y\n  ```\n\n```python\nif x:\n  y\n```\n"
    indented = "- a\n    b\n    - c\n\n    ```sh\n    x\n      y\n    ```\n\n```python\nif x:\n  y\n```\n"
    assert indent_lists(page) == indented


def test_a_link_to_a_program_leads_to_a_copy_and_one_to_a_page_of_the_root_to_a_page(tmp_path):
    root = tmp_path / "root"
    (root / "docs" / "how-to").mkdir(parents=True)
    (root / "deploy").mkdir()
    (root / "deploy" / "run.sh").write_text("true\n")
    (root / "CHANGELOG.md").write_text("[a](docs/how-to/a.md#b)\n")
    text = "[1](../../deploy/run.sh) [2](../../CHANGELOG.md#x) [3](a.md) [4](https://example.org/a)\n"
    (root / "docs" / "how-to" / "a.md").write_text(f"{text}```\n[5](../../deploy/run.sh)\n```\n")
    write_pages(root, tmp_path / "out")
    written = "[1](../files/deploy/run.sh) [2](../project/changelog.md#x) [3](a.md) [4](https://example.org/a)\n"
    assert (tmp_path / "out/how-to/a.md").read_text() == f"{written}```\n[5](../../deploy/run.sh)\n```\n"
    assert (tmp_path / "out/project/changelog.md").read_text() == "[a](../how-to/a.md#b)\n"
    assert (tmp_path / "out/files/deploy/run.sh").read_text() == "true\n"


@pytest.mark.slow
def test_the_navigation_names_pages_that_exist_once(tmp_path):
    named = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    write_python_api(tmp_path)
    write_commands(tmp_path)
    generated = {f"reference/{path.name}" for path in tmp_path.iterdir()} | {"reference/programs.md"}
    written = {str(path.relative_to(DOCS)) for path in all_pages()}
    assert len(named) == len(set(named))
    assert {name for name in named if not name.startswith("project/")} == written | generated


def test_a_page_that_the_navigation_does_not_name_is_at_its_end(tmp_path):
    configuration = tmp_path / "mkdocs.yml"
    configuration.write_text("nav:\n  - Start: index.md\n  - A:\n      - how-to/a.md\n")
    add_to_navigation(configuration, ["how-to/a.md", "how-to/b.md", "index.md"])
    assert configuration.read_text().endswith("      - how-to/a.md\n  - More:\n      - how-to/b.md\n")
    written = configuration.read_text()
    add_to_navigation(configuration, ["how-to/a.md", "how-to/b.md"])
    assert configuration.read_text() == written


@pytest.mark.slow
def test_every_command_is_described_with_all_its_options(tmp_path):
    write_commands(tmp_path)
    app = typer.main.get_command(make_app())
    groups = {"commands": app, "commands-models": app.commands["models"], "commands-cache": app.commands["cache"]}
    for page, group in groups.items():
        text = (tmp_path / f"{page}.md").read_text()
        sections = dict(re.findall(r"^## datasvc (.+?)\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
        commands = {name: command for name, command in group.commands.items() if not hasattr(command, "commands")}
        assert [name.split()[-1] for name in sections] == list(commands)
        for section, command in zip(sections.values(), commands.values(), strict=True):
            options = [
                option
                for parameter in command.params
                if not getattr(parameter, "hidden", False)
                for option in parameter.opts
                if option.startswith("-")
            ]
            assert [option for option in options if option not in section] == []


def test_the_pages_on_python_have_every_public_package(tmp_path):
    assert set(PUBLIC_PACKAGES) - {"datasvc.api"} <= set(PACKAGES)  # `datasvc.api` has the page of the facade
    write_python_api(tmp_path)
    integrations = (tmp_path / "api-datasvc-integrations.md").read_text()
    assert "::: datasvc.integrations.jax.batches\n" in integrations
    for package in PACKAGES:
        text = (tmp_path / f"api-{package.replace('.', '-')}.md").read_text()
        names = set(importlib.import_module(package).__all__) - {"__version__"}
        assert set(re.findall(rf"^::: {re.escape(package)}\.(\w+)$", text, re.MULTILINE)) == names


def test_the_page_on_the_facade_has_every_method_of_a_repository(tmp_path):
    write_python_api(tmp_path)
    text = (tmp_path / "api-facade.md").read_text()
    documented = set(re.findall(r"^    options:\n      heading: (repo\.\w+\.\w+)$", text, re.MULTILINE))
    repo = DataRepository(SimpleNamespace(url="memory://r"))
    rooms = {name: room for name, room in vars(repo).items() if type(room).__module__.startswith("datasvc.api.")}
    assert {type(room).__name__ for room in rooms.values()} == set(api.__all__) - {"DataRepository"}
    methods = {
        f"repo.{name}.{method}"
        for name, room in rooms.items()
        for method in dir(type(room))
        if not method.startswith("_") and callable(getattr(type(room), method))
    }
    assert methods == documented


@pytest.mark.parametrize("module", CLASSES)
def test_the_page_of_a_module_has_its_public_classes(module, tmp_path):
    write_python_api(tmp_path)
    text = (tmp_path / f"api-{module.replace('.', '-')}.md").read_text()
    for name in CLASSES[module]:
        assert inspect.isclass(getattr(importlib.import_module(module), name))
        assert f"::: {module}.{name}\n" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built book."""
    if find_spec("zensical") is None or find_spec("mkdocstrings") is None:
        pytest.skip("zensical and mkdocstrings are not installed: the extra `docs`")
    out = tmp_path_factory.mktemp("book")
    done = subprocess.run(
        [sys.executable, "-m", "tools.book", out], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return out / "site"


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*?\bsrc="([^"]+)"', text)
        loaded += re.findall(r'<link\b[^>]*?\bhref="([^"]+)"', text)
        assert loaded
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
        local = [url.partition("#")[0].partition("?")[0] for url in loaded if not url.startswith("data:")]
        assert [url for url in local if not (page.parent / url).exists() and page.name != "404.html"] == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")) == [], sheet


@pytest.mark.slow
def test_the_site_describes_every_public_name(site):
    for package in PACKAGES:
        text = (site / "reference" / f"api-{package.replace('.', '-')}.html").read_text(encoding="utf-8")
        headings = set(re.findall(r'<h2 id="([\w.]+)"', text))
        names = set(importlib.import_module(package).__all__) - {"__version__"}
        assert {heading.rpartition(".")[2] for heading in headings} >= names


@pytest.mark.slow
def test_the_site_is_searched_in_a_browser_without_a_server_and_without_a_network(site):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs a browser: Debian's chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    requested = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.keyboard.type("trained-on")
        found = page.get_by_role("option").filter(has_text="Provenance")  # not a link of the page itself
        found.first.wait_for(timeout=60_000)
        browser.close()
    assert [url for url in requested if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


@pytest.mark.parametrize("path", sorted((DOCS / "assets").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_reads_in_light_and_dark_and_refers_to_nothing_else(path):
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"title", "desc", "style"} <= names
    assert names.isdisjoint({"script", "image", "use", "foreignObject"})
    assert "prefers-color-scheme:dark" in text
    assert [url for url in re.findall(r"https?://[^\"]+", text) if url != "http://www.w3.org/2000/svg"] == []
    assert any(path.name in page.read_text(encoding="utf-8") for page in all_pages())

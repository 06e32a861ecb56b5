"""Every page that Home leads to, opened in a browser on the repository that the demo makes."""

import json
import re
import subprocess
import sys
import urllib.parse
from collections import Counter

import pytest

from tests.cli.command import ROOT, run
from tests.ui.conftest import CHROMIUM, check_accessible, check_width, commands_of, running_ui

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# Pages of each kind that are opened at most. The kind is the first part of the address.
MOST_PER_KIND = 5
KINDS = {"", "datasets", "models", "diff", "compare", "lineage", "runs", "audit", "cluster", "planner"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The pages of what `make demo` leaves."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: Debian's chromium")
    folder = tmp_path_factory.mktemp("demo") / "run"
    subprocess.run([sys.executable, ROOT / "tools" / "demo.py", folder], check=True)
    # The demo makes one version of its data set; a second one gives the page of differences something to compare.
    done = run("delete", "digits", "--where", "label = 3", "--message", "no threes", "--repo", folder / "repo")
    assert done.returncode == 0, done.stderr
    with running_ui(folder / "repo", ledgers=folder / "ledgers") as server:
        yield server


@pytest.fixture(scope="module")
def paths(demo):
    """Addresses of pages, found by following links from Home."""
    found, queue, counts = [], ["/"], Counter()
    seen = set(queue)
    while queue:
        path = queue.pop(0)
        status, _, html = demo.get(path)
        assert status == 200, path
        found.append(path)
        for link in re.findall(r'<a [^>]*href="(/[^"#]*)', html):
            target = link.replace("&amp;", "&")
            kind = urllib.parse.urlsplit(target).path.split("/")[1]
            # All shapes of addresses, and not all samples and versions.
            shape = (
                re.sub(r"\d+", "0", urllib.parse.urlsplit(target).path),
                frozenset(urllib.parse.parse_qs(urllib.parse.urlsplit(target).query)),
            )
            if kind in KINDS and shape not in seen and counts[kind] < MOST_PER_KIND:
                seen.add(shape)
                counts[kind] += 1
                queue.append(target)
    return found


def test_links_from_home_lead_to_pages_of_each_kind(paths):
    assert {urllib.parse.urlsplit(path).path.split("/")[1] for path in paths} == KINDS


def test_the_values_are_those_of_the_commands(demo, paths):
    different = []
    compared = 0
    for path in paths:
        values = demo.json(path)
        for name, command in commands_of(demo.get(path)[2]).items():
            printed = run(*command[1:])
            if "--json" in command:
                compared += 1
                if printed.returncode != 0 or json.loads(printed.stdout) != values[name]:
                    different.append((path, name, printed.stderr))
    assert different == []
    assert compared > len(paths) / 2


def test_pages_have_no_errors_and_are_accessible_and_narrow(demo, paths, page):
    for path in paths:
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(demo.url + path)
        check_accessible(page)
        check_width(page)


def test_pages_read_the_same_without_scripts(demo, paths, browser):
    context = browser.new_context(java_script_enabled=False)
    window = context.new_page()
    for path in paths:
        response = window.goto(demo.url + path)
        assert response.status == 200
        assert window.locator("main h1").inner_text()
        # What a page says without scripts is all that it says but curves: no part is empty until a script has run.
        assert window.locator("main").get_by_text("Loading").count() == 0
        for section in window.locator("main section").all():
            assert section.inner_text().strip(), f"{path}: {section.evaluate('s => s.outerHTML')[:200]}"
    context.close()

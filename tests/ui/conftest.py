"""Servers of pages, and a browser that opens them."""

import asyncio
import html as html_module
import json
import re
import shlex
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.loaders import ImageLoader
from datasvc.models import ConsumptionTracker
from datasvc.testing import small_dataset
from datasvc.ui.server import run_ui
from datasvc.ui.settings import UiSettings
from datasvc.ui.web import routes
from tests.support import servers

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
QUERY_TIME_S = routes._QUERY_TIME_S
AXE = Path(__file__).with_name("vendor") / "axe.min.js"


class RunningUi:
    """The server of a repository's pages, in a thread of the test."""

    def __init__(self, **settings):
        self.settings = UiSettings(**{"port": 0, **settings})
        self.error = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            raise self.error

    def _run(self):
        async def run():
            self._loop = asyncio.get_running_loop()
            await run_ui(self.settings, self._set_url, self._stop)

        try:
            asyncio.run(run())
        except Exception as error:
            self.error = error
        finally:
            self._ready.set()

    def _set_url(self, url):
        self.url = url.rstrip("/")
        self._ready.set()

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def get(self, path, **headers):
        """Return status, headers and text of a response."""
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.build_opener(NoRedirects).open(request) as response:
                return response.status, response.headers, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def json(self, path, panel=None):
        """Return the JSON twin of a page, or of one panel."""
        status, _, text = self.get(f"/api{path}" + (f"{'&' if '?' in path else '?'}panel={panel}" if panel else ""))
        assert status == 200, text
        return json.loads(text)


class NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


@contextmanager
def running_ui(repository, **settings):
    with pytest.MonkeyPatch.context() as patch:
        if routes._QUERY_TIME_S == QUERY_TIME_S:  # else the test has a limit of its own
            patch.setattr(routes, "_QUERY_TIME_S", 300.0)  # on a busy machine
        server = RunningUi(repository=str(repository), **settings)
        try:
            yield server
        finally:
            server.close()


def fill_repository(url):
    """Make a repository with two data sets, of which one has three versions, and a model with four versions."""
    repo = datasvc.open(str(url), create=True)
    small_dataset(repo, "pets", splits={"train": 96, "val": 24})
    keys = [sample.key for sample in repo.datasets.head("pets@1", 2, split="train")]
    repo.datasets.delete("pets", keys=keys, split="train", message="blurred")
    repo.datasets.tag("pets@2", "prod")
    small_dataset(repo, "birds", samples=12, classes=3)
    for step in (10, 20, 30):
        save_model(repo, "cnn", step, "pets@2")
    save_model(repo, "cnn", 25, "pets@2", parent="cnn@2")
    repo.models.tag("cnn@3", "prod")
    return repo


def save_model(repo, name, step, data, **options):
    """Save a version that was trained on two batches of a split."""
    generator = torch.Generator().manual_seed(step)
    state = {"model": {"fc.weight": torch.randn(8, 4, generator=generator), "fc.bias": torch.zeros(8)}}
    with ImageLoader(
        repo.dataset(data)["train"], batch_size=8, training=True, seed=0, decode="cpu", size=32
    ) as loader:
        tracker = ConsumptionTracker(loader)
        for _, _batch in zip(range(2), loader.numpy(), strict=False):
            pass
        use = tracker.use()
    return repo.models.save(
        name,
        state,
        step=step,
        data=[use],
        config={"batch_size": 8, "rate": 0.1 / step},
        metrics={"val_acc": 0.5 + step / 100, "loss": 1 / step},
        message=f"after {step} steps",
        **options,
    )


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """URL of a repository with data sets and models. Tests must not change it."""
    url = tmp_path_factory.mktemp("ui") / "repo"
    fill_repository(url)
    return url


@pytest.fixture(scope="session")
def ui(filled, tmp_path_factory):
    """The pages of `filled`."""
    with running_ui(filled, thumbnails=tmp_path_factory.mktemp("thumbnails")) as server:
        yield server


# Not for the session: as long as Playwright runs, its event loop counts as the running one of this thread, and
# `asyncio.run` refuses to start in tests of other modules.
@pytest.fixture(scope="module")
def browser():
    """Chromium of this machine; tests are skipped without it."""
    if CHROMIUM is None or servers.are_replaced():
        pytest.skip(servers.REPLACED if CHROMIUM else "needs a browser: Debian's chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """An empty window. The test fails if a page wrote an error to the console, or had an error in a script."""
    errors = []
    context = browser.new_context(viewport={"width": 1280, "height": 800}, permissions=["clipboard-write"])
    window = context.new_page()
    window.on("console", lambda message: errors.append(message.text) if _is_error(message) else None)
    window.on("pageerror", lambda error: errors.append(str(error)))
    yield window
    context.close()
    assert not errors


def _is_error(message):
    # htmx logs these two if a newer request replaces one, as when a slider moves on; they come without `sendError`.
    return message.type == "error" and not re.match("htmx:(afterRequest|sendAbort), ", message.text)


def check_accessible(window):
    """Fail if axe-core finds a violation of WCAG 2 A or AA on the page of a window, in light or in dark colours."""
    for scheme in ("light", "dark"):
        window.emulate_media(color_scheme=scheme)
        # The policy of the page allows no script from elsewhere: this one runs outside of the page's own scripts.
        window.evaluate(AXE.read_text(encoding="utf-8"))
        found = window.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})")
        broken = [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found["violations"]]
        assert not broken, f"{scheme}: {broken}"


def check_width(window, width=400):
    """Fail if a page is wider than a window of `width` pixels."""
    window.set_viewport_size({"width": width, "height": 800})
    # A ResizeObserver gives charts their new size at the end of the next frame.
    window.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert window.evaluate("document.documentElement.scrollWidth") <= width


def commands_of(html):
    """Return the command of each panel, by the name of the panel."""
    menus = re.findall(
        r'aria-label="([^"]*): as command.*?(?:As command</p><pre data-copy="([^"]*)"|As JSON)', html, re.DOTALL
    )
    return {html_module.unescape(name): shlex.split(html_module.unescape(text)) for name, text in menus if text}


def texts(html):
    """Return the text of HTML without its tags."""
    return re.sub(r"<[^>]*>", " ", html)

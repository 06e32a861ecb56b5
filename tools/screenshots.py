"""Screenshots of the pages of `datasvc ui`, for the documentation: 1280 x 800 and 400 x 800, at most 200 kB each.

    python tools/screenshots.py REPOSITORY FOLDER --runs LEDGERS

REPOSITORY is one that `make demo` has made (demo-run/repo), and LEDGERS the folder of its ledgers (demo-run/ledgers).
The repository gets a second version of its data set if it has one alone, and two nodes serve it while the pictures
are taken. Needs Debian's chromium and the package playwright.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.ui_server import UiServer, running_server
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from datasvc.durable import write_file
from datasvc.ledger.audit import find_ledgers

WIDE, NARROW, HEIGHT = 1280, 400, 800
READINGS = 8  # of the nodes, before their charts are taken
PAUSE_S = 0.5
MAX_BYTES = 200_000
PROVEN = re.compile(
    "Proven: no sample of [^.]* was lost or served twice"
)  # on the page of the audit of a run that has ended well, as that of the demo has
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]

_DECODE_VISIBLE = """
Promise.all([...document.images].filter(image => image.getBoundingClientRect().top < 800)
  .map(image => image.decode().catch(() => 0)))
"""


@dataclass(frozen=True)
class Picture:
    """A page and how it is taken."""

    name: str
    path: str
    width: int = WIDE
    scheme: str = "light"


def run(*arguments: str) -> None:
    """Run a command of `datasvc`."""
    subprocess.run([sys.executable, "-m", "datasvc", *arguments], check=True, stdout=subprocess.DEVNULL)


def add_version(repository: str) -> None:
    """Delete a class from the data set of the demo, so that it has two versions to compare."""
    rows = json.loads(
        subprocess.run(
            [sys.executable, "-m", "datasvc", "ls", "--json", "--repo", repository],
            check=True, stdout=subprocess.PIPE,
        ).stdout
    )  # fmt: skip
    for row in rows:
        if row["version"] == 1:
            run("delete", row["name"], "--where", "label = 3", "--message", "without threes", "--repo", repository)


@contextmanager
def running_nodes(repository: str, folder: Path) -> Iterator[list[str]]:
    """Serve the repository by two nodes that read from each other; yield their URLs."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
    nodes = []
    try:
        for number, url in enumerate(urls):
            words = ["serve", "--cache", str(folder / f"cache{number}"), "--repo", repository, "--budget", "10MB"]
            words += ["--port", url.rpartition(":")[2], "--peers", ",".join(urls), "--url", url]
            node = subprocess.Popen([sys.executable, "-m", "datasvc", *words], stdout=subprocess.PIPE, text=True)
            nodes.append(node)
            assert node.stdout is not None
            if not node.stdout.readline():  # it prints its address once it accepts connections
                sys.exit("a node has not started; its error is above")
        yield urls
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


def make_traffic(server: UiServer, urls: list[str]) -> None:
    """Stage a data set on the first node, then on the second one, which reads from the first."""
    name = json.loads(server.fetch("/api/"))["datasets"][0]["name"]
    wait_for_readings(server, 2)
    for url in urls:
        run("stage", f"{name}@1", "--node", url)
    wait_for_readings(server, READINGS)


def wait_for_readings(server: UiServer, count: int) -> None:
    """Wait until the charts of the nodes have some points more."""
    last, num_changes = b"", 0
    while num_changes < count:
        time.sleep(PAUSE_S)
        page = server.fetch("/cluster")
        points = page.partition(b'id="numbers"')[2]
        num_changes += points.count(b"<tr>") != last.count(b"<tr>")
        last = points


def find_pages(server: UiServer, ledgers: Path) -> list[Picture]:
    """Return the pictures of what the repository and the ledgers have."""

    def read(path: str) -> Any:
        return json.loads(server.fetch(f"/api{path}"))

    home = read("/")
    planner = "/planner?forward_ms=4&backward_ms=8&gradients_mb=4&images_per_second=5000&origin=10&nodes=4"
    pictures = [Picture("home", "/"), Picture("cluster", "/cluster"), Picture("planner", planner)]
    pictures += [Picture("runs-dark", "/runs", scheme="dark")]
    for row in home["datasets"][:1]:
        ref = f"{row['name']}@{row['version']}"
        split = f"/datasets/{ref}/samples/train"
        pictures += [
            Picture("dataset", f"/datasets/{ref}"),
            Picture("samples", split),
            Picture("sample", f"{split}/0?models=1"),
            Picture(
                "sample-lineage", f"/lineage/{row['name']}?key={quote(read(f'{split}/0')['sample']['key'], safe='')}"
            ),
        ]
        if row["version"] > 1:
            pictures.append(Picture("diff", f"/diff/{row['name']}@{row['version'] - 1}/{ref}"))
    for row in home["models"][:1]:
        ref = f"{row['name']}@{row['version']}"
        pictures += [Picture("model", f"/models/{ref}"), Picture("lineage", f"/lineage/{ref}")]
        if row["version"] > 1:
            compared = f"/compare/{row['name']}@{row['version'] - 1}/{ref}"
            pictures += [Picture("compare", compared), Picture("heat-map", f"{compared}?norms=1#tensors")]
    for each in read("/runs")["runs"][:1]:
        path = f"/runs/{each['name']}/{each['id']}"
        pictures += [Picture("run", path), Picture("run-narrow", path, NARROW)]
        pictures.append(Picture("run-times", f"{path}#times"))
    return [*pictures, Picture("audit", find_audit(server, ledgers))]


def find_audit(server: UiServer, ledgers: Path) -> str:
    """Return the path of the audit of the first ledger; exit if it is not that of a run without faults."""
    names = find_ledgers(ledgers)
    if not names:
        sys.exit(f"{ledgers} has no ledgers; give the folder of those that `make demo` has written")
    path = f"/audit/{quote(names[0], safe='')}"
    if not PROVEN.search(server.fetch(path).decode()):
        sys.exit(f"{path} does not say that no sample was lost or served twice; make the demo again")
    return path


def take(window: Page, address: str, picture: Picture) -> bytes:
    """Return the screenshot of a page as a PNG with a palette."""
    window.set_viewport_size({"width": picture.width, "height": HEIGHT})
    window.emulate_media(color_scheme="dark" if picture.scheme == "dark" else "light")
    # Ask first: a page that takes long is answered with one that says what is waited for.
    while window.request.get(address + picture.path.partition("#")[0]).status == HTTPStatus.ACCEPTED:
        pass
    window.goto("about:blank")  # an address that differs from the last one only behind "#" would not be loaded again
    response = window.goto(address + picture.path)
    if response is None or response.status != HTTPStatus.OK:
        sys.exit(f"{picture.path} was not answered; expected the status 200")
    # Thumbnails load as they scroll in: wait for those of the first screen.
    window.wait_for_load_state("load")
    window.evaluate(_DECODE_VISIBLE)
    image = Image.open(io.BytesIO(window.screenshot()))
    output = io.BytesIO()
    image.convert("RGB").quantize(256).save(output, "PNG", optimize=True)
    return output.getvalue()


def main() -> None:
    """Write the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder with the ledgers of runs")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is not installed; install Debian's package chromium")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    add_version(arguments.repository)
    options = ["--runs", str(arguments.runs)]
    with (
        tempfile.TemporaryDirectory(prefix="datasvc-screenshots-") as home,
        running_nodes(arguments.repository, Path(home)) as urls,
        running_server(
            arguments.repository, Path(home), [*options, *(word for url in urls for word in ("--node", url))]
        ) as server,
        sync_playwright() as playwright,
    ):
        make_traffic(server, urls)
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        window = browser.new_page()
        for picture in find_pages(server, arguments.runs):
            content = take(window, server.address, picture)
            if len(content) > MAX_BYTES:
                sys.exit(f"{picture.name} has {len(content)} bytes; expected at most {MAX_BYTES}")
            write_file(arguments.folder / f"{picture.name}.png", content)
            print(f"{picture.name}.png  {len(content) // 1000} kB  {picture.path}")
        browser.close()


if __name__ == "__main__":
    main()

"""Screenshots of the pages of `datasvc ui`, for the documentation: light, 1280 x 800, at most 200 kB each.

    python tools/screenshots.py REPOSITORY FOLDER [--runs LEDGERS] [--node URL]

REPOSITORY is one that `make demo` has made (demo-run/repo). Needs Debian's chromium and the package playwright.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.ui_server import UiServer, running_server
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from datasvc.durable import write_file
from datasvc.ledger.folders import find_ledgers

SIZE = {"width": 1280, "height": 800}
MAX_BYTES = 200_000
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]

_DECODE_VISIBLE = """
Promise.all([...document.images].filter(image => image.getBoundingClientRect().top < 800)
  .map(image => image.decode().catch(() => 0)))
"""


def find_pages(server: UiServer, ledgers: Path | None) -> dict[str, str]:
    """Return the path of each page by the name of its picture, for what the repository and the ledgers have."""

    def read(path: str) -> Any:
        return json.loads(server.fetch(f"/api{path}"))

    home = read("/")
    pages = {"home": "/", "cluster": "/cluster", "planner": "/planner", "runs": "/runs"}
    for row in home["datasets"][:1]:
        ref = f"{row['name']}@{row['version']}"
        split = f"/datasets/{ref}/samples/train"
        pages |= {"dataset": f"/datasets/{ref}", "samples": split, "sample": f"{split}/0"}
        if row["version"] > 1:
            pages["diff"] = f"/diff/{row['name']}@{row['version'] - 1}/{ref}"
    for row in home["models"][:1]:
        ref = f"{row['name']}@{row['version']}"
        pages |= {"model": f"/models/{ref}", "lineage": f"/lineage/{ref}"}
        if row["version"] > 1:
            pages["compare"] = f"/compare/{row['name']}@{row['version'] - 1}/{ref}"
    for run in read("/runs")["runs"][:1]:
        pages["run"] = f"/runs/{run['name']}/{run['id']}"
    for ledger in [] if ledgers is None else find_ledgers(ledgers)[:1]:
        pages["audit"] = f"/audit/{quote(ledger, safe='')}"
    return pages


def take(window: Page, address: str, path: str) -> bytes:
    """Return the screenshot of a page as a PNG with a palette."""
    window.goto(address + path)
    # Thumbnails load as they scroll in: wait for those of the first screen.
    window.wait_for_load_state("load")
    window.evaluate(_DECODE_VISIBLE)
    picture = Image.open(io.BytesIO(window.screenshot()))
    output = io.BytesIO()
    picture.convert("RGB").quantize(256).save(output, "PNG", optimize=True)
    return output.getvalue()


def main() -> None:
    """Write the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, help="folder with the ledgers of runs")
    parser.add_argument("--node", action="append", default=[], help="URL of a node's server")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is not installed; install Debian's package chromium")
    options = [text for url in arguments.node for text in ("--node", url)]
    options += ["--runs", str(arguments.runs)] if arguments.runs else []
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="datasvc-screenshots-") as home,
        running_server(arguments.repository, Path(home), options) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        window = browser.new_page(viewport=SIZE)
        for name, path in find_pages(server, arguments.runs).items():
            content = take(window, server.address, path)
            if len(content) > MAX_BYTES:
                sys.exit(f"{name} has {len(content)} bytes; expected at most {MAX_BYTES}")
            write_file(arguments.folder / f"{name}.png", content)
            print(f"{name}.png  {len(content) // 1000} kB  {path}")
        browser.close()


if __name__ == "__main__":
    main()

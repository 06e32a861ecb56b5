"""Build the book: `python -m tools.book OUT` writes its pages to `OUT/site`, which can be read without a network.

Zensical builds the site from `mkdocs.yml`. It is the successor of Material for MkDocs, by the same authors, and reads
the same configuration. MkDocs 1 and Material for MkDocs get no more features.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from datasvc.extras import how_to_install
from tools.book.command_line import write_commands
from tools.book.pages import write_pages
from tools.book.python_api import write_python_api

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Write all pages below OUT/docs, and build them with strict links."""
    parser = argparse.ArgumentParser(prog="python -m tools.book", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the site; what was in it is removed")
    out = parser.parse_args().out.absolute()
    if importlib.util.find_spec("zensical") is None:
        sys.exit(f"zensical is not installed: {how_to_install('docs')}")
    write_project(out)
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "-f", out / "mkdocs.yml"], cwd=out, check=True
    )
    print(out / "site" / "index.html")


def write_project(out: Path) -> None:
    """Write what Zensical builds to the folder `out`: the pages, the generated pages, and the configuration."""
    if out.exists() and not (out / "mkdocs.yml").exists() and any(out.iterdir()):
        sys.exit(f"{out} has other files; name an empty folder, or one that this program has written")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # First: it marks the folder as ours.
    shutil.copy(ROOT / "mkdocs.yml", out)
    docs = out / "docs"
    write_pages(ROOT, docs)
    write_commands(docs / "reference")
    write_python_api(docs / "reference")
    add_to_navigation(out / "mkdocs.yml", sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md")))
    # mkdocstrings reads the sources; it looks for them below the folder of the configuration.
    (out / "source").symlink_to(ROOT)


def add_to_navigation(configuration: Path, pages: list[str]) -> None:
    """Add the pages that the navigation does not name to its end, so that no page is lost."""
    text = configuration.read_text(encoding="utf-8")
    named = set(re.findall(r"\S+\.md$", text, re.MULTILINE))
    rest = [page for page in pages if page not in named]
    if rest:
        # The navigation is the last setting of the file.
        lines = ["  - More:", *(f"      - {page}" for page in rest)]
        configuration.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

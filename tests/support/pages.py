"""The pages of the documentation by name: a test that reads one does not depend on the folder of the page."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def find_page(name):
    """Return the path of the page `name`, such as "loaders.md", wherever it is below `docs/`."""
    (path,) = DOCS.rglob(name)
    return path


def all_pages():
    """Return the paths of all pages below `docs/`."""
    return sorted(DOCS.rglob("*.md"))

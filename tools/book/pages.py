"""Copies the written pages. They are written for readers of the source tree; two things differ in the book.

- A link may lead out of `docs/`: to a page of the root, which becomes a page of the book, or to a program or an
  example, which is copied into the book as a file.
- Python-Markdown, which Zensical uses, indents lists by four spaces.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

# Pages of the root that the book has too.
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)((?:#[^)\s]*)?)\)")
_FENCE = re.compile(r"( *)```")


def write_pages(root: Path, docs: Path) -> None:
    """Copy `docs/` and the pages of the root to the folder `docs`, with links that hold there."""
    shutil.copytree(root / "docs", docs)
    (docs / "project").mkdir()
    sources = {path: docs / path.relative_to(root / "docs") for path in (root / "docs").rglob("*.md")}
    sources |= {root / name: docs / "project" / name.lower() for name in ROOT_PAGES if (root / name).exists()}
    for source, target in sources.items():
        text = indent_lists(source.read_text(encoding="utf-8"))
        target.write_text(_replace_links(text, source, target, sources, root, docs), encoding="utf-8")


def _replace_links(text: str, source: Path, target: Path, sources: dict[Path, Path], root: Path, docs: Path) -> str:
    def replace(match: re.Match[str]) -> str:
        linked = (source.parent / match[1]).resolve()
        if linked == root / "README.md" or not linked.exists():
            # The README is for readers of the source tree; its place in the book is the first page. What does not
            # exist stays as it is, and the strict build reports it.
            goal = docs / "index.md" if linked.exists() else target.parent / match[1]
        elif linked in sources:
            goal = sources[linked]
        elif linked.is_relative_to(root / "docs"):
            goal = docs / linked.relative_to(root / "docs")
        else:
            goal = docs / "files" / linked.relative_to(root)
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, goal)
        return f"]({os.path.relpath(goal, target.parent)}{match[2]})"

    # Code shows brackets and parentheses too: only prose has links.
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(replace, part) for number, part in enumerate(parts))


def indent_lists(text: str) -> str:
    """Return a page with twice the indentation outside of code, and code in a list indented with its list."""
    lines: list[str] = []
    fence: str | None = None
    for line in text.splitlines():
        spaces = " " * (len(line) - len(line.lstrip(" ")))
        if fence is None:
            match = _FENCE.match(line)
            fence = match[1] if match else None
            lines.append(spaces + line)
        else:
            lines.append(fence + line if line else line)
            if line.startswith(f"{fence}```"):
                fence = None
    return "\n".join(lines) + "\n"

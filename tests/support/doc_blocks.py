"""The fenced blocks of a page, and a shell that runs them one after the other, as a reader would."""

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support import warm_python
from tests.support.pages import ROOT, find_page

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its place, and the exit status that the words before it name."""

    language: str
    text: str
    place: str
    status: int


def read_blocks(name):
    text = find_page(name).read_text()
    blocks, stop = [], 0
    for match in FENCE.finditer(text):
        named = re.search(r"exit status (\d):\s*$", text[stop : match.start()])
        place = f"{name}, line {text.count(chr(10), 0, match.start()) + 1}"
        blocks.append(Block(match[1], match[2], place, int(named[1]) if named else 0))
        stop = match.end()
    return blocks


def replace_in(blocks, texts):
    """Return the blocks with other texts in the place of those that name what only the reader has."""
    for text, other in texts.items():
        assert any(text in block.text for block in blocks), text
        blocks = [replace(block, text=block.text.replace(text, other)) for block in blocks]
    return blocks


def run_blocks(blocks, folder, **environment):
    """Run blocks one after the other, in one shell, which keeps what they export.

    A Python block whose first line is a comment with the name of a file, `# train.py`, is only written to this file.
    """
    script = ["set -eu"]
    for number, block in enumerate(blocks):
        text = block.text
        if block.language == "python":
            named = re.match(r"# (\w+\.py)\n", text)
            program = folder / (named[1] if named else f"program_{number}.py")
            program.write_text(text)
            text = "" if named else f"python {program}\n"
        script.append(f"echo '{block.place}:' >&2")
        script.append(text if not block.status else f"set +e\n{text}test $? -eq {block.status} || exit 99\nset -e")
    script.append("echo all of them ran")
    if not (folder / "tools").exists():
        (folder / "tools").symlink_to(ROOT / "tools")
    path = os.pathsep.join((str(_warm_programs()), str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.endswith("all of them ran\n")
    return done.stdout


@functools.cache
def _warm_programs() -> Path:
    """Return a folder with `python` and `datasvc`, started as `warm_python` does."""
    python = Path(warm_python.command())
    folder = python.parent / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(python)
    program = "import sys; sys.argv[0] = 'datasvc'; from datasvc.cli.main import main; main()"
    (folder / "datasvc").write_text(f'#!/bin/sh\nexec {python} -c "{program}" "$@"\n')
    (folder / "datasvc").chmod(0o755)
    return folder

"""What people meet at the prompt: how soon a command answers, its help, its completion, and what it does to data."""

import subprocess
import sys

import pytest

from datasvc.testing import small_dataset

_LOADED = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from datasvc.cli.main import main; main()"


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["--version"], {"numpy", "pyarrow", "fsspec", "asyncio", "pydantic", "rich.console", "datasvc.repository"}),
        (["ls", "--repo"], {"numpy", "pyarrow", "fsspec", "pandas", "torch", "duckdb", "rich.console"}),
    ],
)
def test_a_short_question_does_not_wait_for_packages_that_it_does_not_use(tmp_path, words, unused):
    """simonw/llm#1282, codalab/codalab-worksheets#3211: `--version` took seconds, all of them imports."""
    if words[0] == "ls":
        small_dataset(str(tmp_path / "repo"), "pets", samples=4)
        words = [*words, str(tmp_path / "repo")]
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert not unused & set(done.stdout.split())
    assert "typer" in done.stdout.split()

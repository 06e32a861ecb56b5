"""The examples of the page torch.md run as they stand; those of packages that are not installed are skipped."""

import re
from importlib.util import find_spec

import pytest

from tests.support.pages import find_page

GUIDE = find_page("torch.md")
EXAMPLES = dict(re.findall(r"^## (.+?)\n\n```python\n(.+?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE))


def test_there_is_an_example_of_each():
    assert list(EXAMPLES) == [
        "ResumableDataLoader",
        "torch's DataLoader",
        "torchdata's StatefulDataLoader",
        "Lightning",
        "Hugging Face accelerate",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_runs(heading, digits, tmp_path, monkeypatch):
    code = EXAMPLES[heading]
    needed = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    (tmp_path / "repo").symlink_to(digits.repository.url.removeprefix("file://"))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, heading, "exec"), {"__name__": "__main__"})

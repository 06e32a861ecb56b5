"""The Python of the pages loaders.md and mixtures.md, and of the README, runs as it stands, a page in one program."""

import re

import pytest

from datasvc.loaders.core.loader import Loader
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.shards.sources import SourceOptions
from tests.loaders.images.test_geometry import sample
from tests.shards.sources.text.test_tokens import train
from tests.support.pages import ROOT, find_page

BLOCKS = {path.name: re.findall(r"^```python\n(.+?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
          for path in (find_page("loaders.md"), find_page("mixtures.md"), ROOT / "README.md")}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits_folder, digits):
    """A folder as the pages find it: data sets in `repo`, a tokenizer with a template, `demo-run` of the tutorial."""
    place = tmp_path_factory.mktemp("place")
    repository = Repository.create(str(place / "repo"))
    ingest(repository, str(digits_folder), "pets")
    ingest(repository, [{**sample(seed), "box_crowd": [False] * 3} for seed in range(32)], "scenes")
    train(place / "tokenizer.json")
    (place / "text" / "train").mkdir(parents=True)
    lines = "".join(f'{{"text": "some words and {number} more"}}\n' for number in range(200))
    (place / "text" / "train" / "lines.jsonl").write_text(lines, encoding="utf-8")
    ingest(repository, [{"key": f"{number}", "tokens": [number] * 1500} for number in range(32)], "documents")
    (place / "tokenizer").mkdir()
    (place / "tokenizer" / "tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes())
    template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    (place / "tokenizer" / "chat_template.jinja").write_text(template + prompt)
    options = SourceOptions(tokenizer=str(place / "tokenizer.json"), block_tokens=16)
    ingest(repository, str(place / "text"), "tokens", source_options=options)
    (place / "demo-run").mkdir()
    (place / "demo-run" / "repo").symlink_to(digits.repository.url.removeprefix("file://"))
    return place


def test_there_are_examples_on_each_page():
    assert [len(blocks) for blocks in BLOCKS.values()] == [15, 4, 1]


@pytest.mark.slow
@pytest.mark.parametrize("page", BLOCKS)
def test_the_examples_of_a_page_run(page, place, monkeypatch):
    monkeypatch.chdir(place)
    names = {"__name__": "__main__"}
    for number, block in enumerate(BLOCKS[page]):
        code = compile(block, f"{page}, block {number}", "exec")
        if 'init_device_mesh("cuda"' in block:
            continue  # four GPUs; tests of data ranks have a mesh of processors
        exec(code, names)
        for loader in [value for value in names.values() if isinstance(value, Loader)]:
            assert len(next(iter(loader)).positions)  # what is only made works, too
            loader.close()

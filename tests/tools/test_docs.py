"""The commands and programs of the documentation run as they stand, in their order."""

import ast
import functools
import importlib.util
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from typer.main import get_command

import datasvc
from datasvc.cli.main import make_app
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.cli.command import run
from tests.shards.export.contents import write_photos
from tests.support.doc_blocks import FENCE, Block, read_blocks, replace_in, run_blocks
from tests.support.pages import ROOT, all_pages, find_page
from tests.test_imports import ALLOWED, ROOMS

# The pages whose commands continue each other, and the data sets that they make, with the number of their versions.
INGEST = ["ingest.md", "sources.md", "data-versions.md"]
MADE = {
    "digits": 3,
    "by-folder": 1,
    "photos": 1,
    "by-csv": 1,
    "by-lines": 1,
    "by-parquet": 1,
    "imagenet": 1,
    "tars": 2,
    "scans": 2,
    "irises": 2,
    "digits-hf": 2,
    "caffe": 1,
    "caffe-pixels": 1,
    "plain": 1,
    "records": 1,
    "digits-of-mxnet": 1,
    "shards": 1,
    "levels": 2,
    "tokens": 1,
    "tokens-of-lines": 1,
    "squares": 1,
    "digits-small": 1,
    "halves": 1,
    "lines": 1,
    "digits-but-one": 1,
    "digits-limited": 1,
    "irises-held-out": 2,  # the second one renames it
    "irises-small": 1,
    "flowers": 1,
    "all-digits": 1,
    "digits-copy": 1,
}


def versions(repository):
    return {name: repository.versions("datasets", name).head() for name in repository.names("datasets")}


def check_ingested(folder, bucket, made):
    assert versions(Repository.open(str(folder / "repo"))) == made
    local = open_dataset(Repository.open(str(folder / "repo")), "digits@1")
    remote = open_dataset(Repository.open(f"{bucket}/repo"), "digits")
    assert {name: len(split) for name, split in local.items()} == {"train": 80, "val": 20}
    assert {name: len(split) for name, split in remote.items()} == {"train": 80, "val": 20}
    assert (folder / "digits.html").read_text().count("<img") == 40  # 20 of train and 20 of val


@pytest.mark.slow
@pytest.mark.long
def test_every_command_of_the_pages_on_ingest_runs_on_s3_and_on_ray(tmp_path, s3_bucket):
    bucket = f"{s3_bucket}/docs"
    blocks = [block for page in INGEST for block in read_blocks(page)]
    assert [block.status for block in blocks if block.status] == [6]
    assert [block for block in blocks if "--engine ray" in block.text]
    printed = run_blocks(replace_in(blocks, {"s3://bucket": bucket}), tmp_path)
    assert "committed digits-but-one@1: 80 train, 20 val samples" in printed
    check_ingested(tmp_path, bucket, {**MADE, "scans-ray": 1})


@pytest.mark.slow
def test_every_command_of_the_page_on_export_runs(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    for _ in range(3):
        write_photos(repository, name="pets")
    blocks = [block for block in read_blocks("export.md") if block.language == "sh"]
    assert blocks
    run_blocks(replace_in(blocks, {"s3://bucket": f"file://{tmp_path}/bucket"}), tmp_path)
    for folder in ("pets-wds", "pets-val", "bucket/pets-mds"):
        assert (tmp_path / folder / "datasvc-export.json").exists()
    assert not (tmp_path / "pets-val" / "train-00000-of-00002.parquet").exists()


@pytest.mark.slow
def test_every_command_and_program_of_the_page_on_choosing_samples_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("digits")
    for number in range(200):
        path = folder / ("val" if number % 7 == 0 else "train") / str(number % 10) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + number, 8), (number, 0, 0)).save(path)
    datasvc.ingest(str(folder), "digits", repo="demo-run/repo", workers=1)
    names = {}
    for block in read_blocks("choose-samples.md"):
        if block.language == "python":
            exec(compile(block.text, block.place, "exec"), names)
            continue
        for line in block.text.splitlines():
            words = shlex.split(line.replace("demo-run/", f"{tmp_path}/demo-run/"), comments=True)
            done = run(*words[1:])
            assert done.returncode == 0, (line, done.stderr)
    assert set(repo_views := names["repo"].datasets.views("digits")) == {"small", "threes"}
    assert repo_views["small"].samples == len(names["small"]) > 0
    assert len(names["some"]) == sum(1 for number in range(200) if number % 7 and number % 10 in {3, 5})
    assert len(names["first"]) + len(names["second"]) == len(names["train"])


@pytest.mark.slow
def test_every_command_of_the_page_on_branches_runs(tmp_path):
    blocks = [block for block in read_blocks("branches.md") if block.language]
    printed = run_blocks(blocks, tmp_path)
    # The text that the page shows for the conflict is what the command prints.
    shown = next(block.text for block in read_blocks("branches.md") if not block.language)
    assert "train/cat1: changed in pets@7, changed in pets@6" in shown
    assert "committed pets@8, pets@6 merged into pets@7 (common ancestor pets@3): changed 1 train" in printed
    repository = Repository.open(str(tmp_path / "repo"))
    assert {sample["key"]: sample["text"] for sample in open_dataset(repository, "pets@8")["train"]} == {
        "cat1": "of the branch", "cat3": "cat3", "dog2": "dog2", "emu1": "emu1", "emu2": "emu2"
    }  # fmt: skip
    assert "[8, None]" in printed


@pytest.mark.slow
def test_every_command_of_the_page_on_removal_runs(tmp_path):
    printed = run_blocks([block for block in read_blocks("remove-data.md") if block.language], tmp_path)
    assert "would purge 2 samples: ann1, ann2" in printed
    assert "versions: people@1 (2), people@2 (1)" in printed
    assert "people@1 (2 purged)" in printed
    assert "ann1\t\nann2\t" in printed
    assert json.loads((tmp_path / "certificate.json").read_text())["complete"]


@pytest.mark.slow
def test_every_command_of_the_page_on_corrected_labels_runs(tmp_path):
    printed = run_blocks([block for block in read_blocks("correct-labels.md") if block.language], tmp_path)
    assert "would change 2 train samples of pets@2" in printed
    (relabelled,) = re.findall(r"relabelled: 3 \((.*)\)", printed)
    assert sorted(relabelled.split(", ")) == ["3 dog to cat", "4 cat to dog", "6 cat to dog"]
    assert "label and label_bob agree on 2 of 6 samples" in printed
    split = open_dataset(Repository.open(str(tmp_path / "repo")), "pets")["train"]
    classes = {sample["key"]: sample.class_name for sample in split}
    assert classes == {"1": "cat", "2": "cat", "3": "cat", "4": "dog", "5": "cat", "6": "dog"}
    assert {sample["key"]: sample["score"] for sample in split if sample["score"]} == {"1": 0.25, "2": 0.5}
    assert not split.table.overlays.groups


@pytest.mark.slow
def test_the_script_of_the_first_steps_resumes_and_has_nothing_left_to_do_when_it_has_ended(tmp_path):
    blocks = read_blocks("start.md")
    script = next(block for block in blocks if block.language == "python")
    changed = Block("python", script.text.replace("EPOCHS = 3", "EPOCHS = 4"), "changed", 0)
    printed = run_blocks([*blocks, script, changed], tmp_path)
    assert re.findall(r"^\d+ steps: .*", printed, re.MULTILINE) == [
        "66 steps: digits-net@3",
        "66 steps: digits-net@3",
        "88 steps: digits-net@4",
    ]


def test_every_source_that_is_made_is_ingested_by_the_page():
    text = "".join(block.text for page in INGEST for block in read_blocks(page))
    sources = (ROOT / "tools" / "make_sources.py").read_text()
    names = re.findall(r'^    "([\w-]+)": \w+\.write_', sources, re.MULTILINE)
    assert len(names) > 20
    assert [name for name in names if f"sources/{name} " not in text and f"sources/{name}/" not in text] == []


def test_every_program_of_the_page_on_testing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = [block for block in read_blocks("testing.md") if block.language == "python"]
    assert len(programs) == 4
    for program in programs:
        exec(compile(program.text, program.place, "exec"), {"__name__": "__main__"})


PAGES = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    folders = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir()))
    paths = re.findall(rf"`((?:{folders})/[\w./-]*|[\w./-]+\.(?:py|md|toml))`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_page_that_a_file_of_the_project_names_exists():
    folders = ("datasvc", "loaders", "trainer", "tools", "examples", "deploy")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".yaml", ".sh"}
    ]
    files += [ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {(path, page) for path in files for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 20
    assert [f"{path}: {page}" for path, page in sorted(named) if not (ROOT / page).exists()] == []


def test_pictures_of_pages_are_small_and_each_is_shown():
    pictures = sorted((ROOT / "docs" / "assets" / "pages").glob("*.png"))
    assert len(pictures) >= 10
    assert [path.name for path in pictures if path.stat().st_size > 200_000] == []
    shown = set(re.findall(r"assets/pages/([\w-]+\.png)", find_page("ui.md").read_text()))
    assert shown == {path.name for path in pictures}


def anchors(path):
    """Return the names of the headings of a page, as links have them."""
    text = FENCE.sub("", path.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        *(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles),
        *re.findall(r'<a id="([\w-]+)">', text),
    }


@pytest.mark.parametrize(
    "page",
    [*PAGES, "CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in all_pages())],
)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    path = ROOT / page
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", FENCE.sub("", path.read_text())):
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def test_the_comparison_has_figures_of_the_benchmarks_only():
    table = find_page("comparison.md").read_text().partition("## Features")[0].partition("|---|")[2]
    figures = re.findall(r"(?<![\w-])\d[\d,]*\.\d+|\d,\d{3}", table)
    measured = find_page("benchmarks.md").read_text()
    assert len(figures) > 20
    # The page rounds shares of bytes and of time to two places.
    rounded = {f"{float(each):.2f}" for each in re.findall(r"\d\.\d{3}", measured)}
    values = {each.replace(",", "") for each in re.findall(r"\d[\d,.]*\d", measured)} | rounded
    assert [figure for figure in figures if figure.replace(",", "") not in values] == []


def read_rooms():
    """Return the tree of rooms of ARCHITECTURE.md: the rooms of each package, as lines by their level."""
    tree, _ = FENCE.findall((ROOT / "ARCHITECTURE.md").read_text())
    rooms, package = {}, ""
    for line in tree[1].splitlines():
        level, name = re.match(r"(?:  (\d+) )?(\S+)", line).groups()
        if level is None:
            assert (ROOT / name / "__init__.py").exists(), line
            package = f"datasvc/{name}".replace("datasvc/datasvc", "datasvc").rstrip("/").replace("/", ".")
            continue
        assert name == "." or (ROOT / package.replace(".", "/") / name).exists(), line
        room = name if name == "." else name.removesuffix(".py").rstrip("/").replace("/", ".")
        rooms.setdefault(package, {}).setdefault(int(level), set()).add(room)
    return rooms


def test_the_tree_of_rooms_is_the_one_that_holds():
    assert read_rooms() == {
        package: {level: set(line.split()) for level, line in enumerate(lines, 1)} for package, lines in ROOMS.items()
    }


def test_the_imports_between_packages_are_those_that_hold():
    _, lists = FENCE.findall((ROOT / "ARCHITECTURE.md").read_text())
    allowed = {}
    for line in lists[1].splitlines():
        packages, targets = line.split(": ")
        names = set() if targets == "nothing" else set(targets.split())
        for package in packages.split(", "):
            allowed[package] = {name.rstrip("+") for name in names}
            allowed[package].update(*(allowed[name.rstrip("+")] for name in names if name.endswith("+")))
    held = {name.removeprefix("datasvc."): targets for name, targets in ALLOWED.items()}
    assert allowed == {name: {target.removeprefix("datasvc.") for target in held[name]} for name in held}


@pytest.mark.parametrize("page", ["README.md", *(str(path.relative_to(ROOT)) for path in all_pages())])
def test_every_name_that_a_page_imports_exists(page):
    imports = [
        node
        for match in FENCE.finditer((ROOT / page).read_text())
        if match[1] == "python"
        for node in ast.walk(ast.parse(match[2]))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("datasvc")
    ]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert [(module, name) for module, name in names if not defines(module, name)] == []


def defines(module, name):
    """Return whether a module defines a name, by its source if it adapts a package: these take long to import."""
    if not module.startswith("datasvc.integrations."):
        return hasattr(importlib.import_module(module), name)
    source = Path(importlib.util.find_spec(module).origin).read_text()
    return any(getattr(node, "name", None) == name for node in ast.parse(source).body)


def test_every_variable_of_an_option_is_on_a_page():
    sources = "".join(path.read_text() for path in (ROOT / "datasvc/cli").rglob("*.py"))
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *all_pages()])
    variables = set(re.findall(r'envvar="(DATASVC_\w+)"', sources))
    assert len(variables) > 4
    assert {name for name in variables if f"`{name}`" not in pages} == set()


SEPARATORS = frozenset({"|", "||", "&", "&&", ";", "<", ">", "(", ")"})


def split_lines(text):
    """Return the words of each line of a shell; a text in quotes may have several lines."""
    lines, rest = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(rest + line.removeprefix("$ "), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        try:
            lines.append(list(words))
            rest = ""
        except ValueError:  # the quotes end on a later line
            rest += line + "\n"
    return lines


def documented_commands():
    """Return the `datasvc` commands of all pages: the page, and the words after the name of the program."""
    for path in [*all_pages(), ROOT / "README.md"]:
        for match in FENCE.finditer(path.read_text()):
            for words in split_lines(match[2]) if match[1] in {"sh", "bash", "console", ""} else []:
                for _, group in itertools.groupby(words, SEPARATORS.__contains__):
                    command = list(group)
                    if command[0] == "datasvc":
                        yield path.name, command[1:]


def test_commands_of_the_pages_have_the_options_that_they_name():
    checked, unknown = 0, []
    command_of = functools.cache(lambda word: get_command(make_app(word)))
    for page, words in documented_commands():
        command, rest = command_of(words[0]), words
        while rest and rest[0] in getattr(command, "commands", ()):
            command, rest = command.commands[rest[0]], rest[1:]
        if command.context_settings.get("ignore_unknown_options"):
            continue  # a program of the trainer, which parses its own options
        options = {
            "--help",
            *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)),
        }
        named = {word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)}
        checked += 1
        # A group alone does nothing, but has options: `datasvc --version`.
        if (hasattr(command, "commands") and not named) or not named <= options:
            unknown.append((page, words))
    assert unknown == []
    assert checked > 150

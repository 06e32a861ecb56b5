"""The rooms of the house: who may import whom, how large a room is, that `import datasvc` and `show` are cheap."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from datasvc.testing import small_dataset

ROOT = Path(__file__).parents[1]
# The folders of the product, and the package that each is imported as.
FOLDERS = {"datasvc": "datasvc", "loaders": "datasvc.loaders", "trainer": "datasvc.trainer"}
MAX_MODULES = 16

# What each package may import, beside itself.
ALLOWED = {
    "datasvc.arrow_messages": set(),
    "datasvc.errors": set(),
    "datasvc.extras": {"datasvc.errors"},
    "datasvc.child_process": set(),
    "datasvc.printable": set(),
    "datasvc.threads": {"datasvc.sizes"},
    "datasvc.drawing": {"datasvc.printable", "datasvc.sizes"},
    "datasvc.shown": {"datasvc.errors", "datasvc.extras"},
    "datasvc.durable": {"datasvc.errors"},
    "datasvc.keyed_random": {"datasvc.errors"},
    "datasvc.sizes": {"datasvc.errors"},
    "datasvc.progress": {"datasvc.printable", "datasvc.sizes"},
    "datasvc.sql_sandbox": {"datasvc.child_process", "datasvc.errors", "datasvc.extras"},
    "datasvc.order": {"datasvc.errors", "datasvc.keyed_random"},
    "datasvc.mix_schedule": {"datasvc.errors"},
    "datasvc.mix_order": {"datasvc.keyed_random", "datasvc.mix_schedule", "datasvc.order"},
    "datasvc.repository": {
        "datasvc.child_process",
        "datasvc.errors",
        "datasvc.durable",
        "datasvc.extras",
        "datasvc.progress",
        "datasvc.threads",
    },
}
ALLOWED["datasvc.shards"] = {
    "datasvc.arrow_messages",
    "datasvc.shown",
    "datasvc.repository",
    "datasvc.order",
    "datasvc.keyed_random",
    "datasvc.durable",
    "datasvc.errors",
    "datasvc.extras",
    "datasvc.child_process",
    "datasvc.printable",
    "datasvc.threads",
    "datasvc.progress",
    "datasvc.sizes",
    "datasvc.sql_sandbox",
}
ALLOWED["datasvc.runs"] = {
    "datasvc.repository",
    "datasvc.errors",
    "datasvc.printable",
    "datasvc.shown",
    "datasvc.threads",
}
ALLOWED["datasvc.runs"] |= {"datasvc.threads"}  # its use of them is in percent of those that it may use
ALLOWED["datasvc.ledger"] = ALLOWED["datasvc.shards"] | {"datasvc.shards", "datasvc.mix_schedule"}
ALLOWED["datasvc.cache"] = ALLOWED["datasvc.shards"] | {"datasvc.shards", "datasvc.sizes"}
ALLOWED["datasvc.planning"] = ALLOWED["datasvc.cache"] | {"datasvc.cache"}  # pure: the page uses it without torch
ALLOWED["datasvc.models"] = ALLOWED["datasvc.cache"] | {"datasvc.cache", "datasvc.ledger", "datasvc.mix_order"}
ALLOWED["datasvc.models"] |= {"datasvc.mix_schedule"}
ALLOWED["datasvc.replay"] = ALLOWED["datasvc.models"] | {"datasvc.models", "datasvc.runs", "datasvc.loaders"}
ALLOWED["datasvc.api"] = ALLOWED["datasvc.models"] | {"datasvc.models", "datasvc.runs", "datasvc.replay"}
ALLOWED["datasvc.views"] = ALLOWED["datasvc.api"] | {"datasvc.planning", "datasvc.drawing", "datasvc.loaders"}
ALLOWED["datasvc.testing"] = ALLOWED["datasvc.api"] | {"datasvc.api"}
ALLOWED["datasvc.node"] = ALLOWED["datasvc.cache"] | {"datasvc.cache", "datasvc.loaders"}
ALLOWED["datasvc.doctor"] = ALLOWED["datasvc.node"] | {"datasvc", "datasvc.node", "datasvc.models"}
ALLOWED["datasvc.ui"] = ALLOWED["datasvc.api"] | {
    "datasvc.api",
    "datasvc.drawing",
    "datasvc.views",
    "datasvc.ledger",
    "datasvc.node",
    "datasvc.runs",
    "datasvc.planning",
}
ALLOWED["datasvc.cli"] = ALLOWED["datasvc.api"] | {
    "datasvc.api",
    "datasvc.node",
    "datasvc.planning",
    "datasvc.ledger",
}
ALLOWED["datasvc"] = {"datasvc.errors", "datasvc.progress", "datasvc.api", "datasvc.shards"}
ALLOWED["datasvc.loaders"] = {
    "datasvc.shown",
    "datasvc.printable",
    "datasvc.threads",
    "datasvc.ledger",
    "datasvc.child_process",
    "datasvc.durable",
    "datasvc.repository",
    "datasvc.shards",
    "datasvc.order",
    "datasvc.mix_order",
    "datasvc.mix_schedule",
    "datasvc.keyed_random",
    "datasvc.cache",
    "datasvc.errors",
    "datasvc.extras",
}
ALLOWED["datasvc.trainer"] = {"datasvc.extras", "datasvc.keyed_random", "datasvc.printable", "datasvc.threads"}
ALLOWED["datasvc.trainer.recipes"] = {"datasvc", "datasvc.trainer", "datasvc.loaders"} | ALLOWED["datasvc.cli"]
ALLOWED["datasvc.trainer.__main__"] = {"datasvc.trainer", "datasvc.trainer.recipes"}
ALLOWED["datasvc.trainer.__main__"] |= {"datasvc.errors", "datasvc.printable"}
ALLOWED["datasvc.cli"] = ALLOWED["datasvc.cli"] | {
    "datasvc",  # the version
    "datasvc.doctor",
    "datasvc.drawing",
    "datasvc.trainer.__main__",  # `datasvc train`
    "datasvc.trainer.recipes",  # `datasvc plan layouts`
    "datasvc.ui",
    "datasvc.views",
}
ALLOWED["datasvc.__main__"] = {"datasvc.cli"}

ALLOWED["datasvc.integrations"] = ALLOWED["datasvc.api"] | {
    "datasvc.api",
    "datasvc.loaders",
    "datasvc.trainer",
    "datasvc.trainer.recipes",  # random states
}

# The rooms of each package, bottom first: a room imports rooms of lines before its own. "." are the modules in the
# folder of the package itself; its `__init__` is on top unless it is listed.
ROOMS = {
    "datasvc.repository": ["store", "objects", "logs", "."],
    "datasvc.shards": [
        "format images audio video lines",
        "sources packing",
        "versions",
        "history ingestion query export",
        "views",
    ],
    "datasvc.shards.sources": ["common", "tabular tar mds arrays records text", "images", "."],
    "datasvc.cache": ["catalogue sources", "peers", "fetch", ".", "prefetch"],
    "datasvc.models": [
        "tensors",
        "versions",
        "restoring search local",
        "saving",
        "interop dcp",
        "registry",
        "provenance",
        "transfer",
    ],
    "datasvc.node": ["transfers", "http", "."],
    "datasvc.ui": ["settings caches", "web", "pages registry", "server"],
    "datasvc.cli": ["terminal", "nodes datasets", "models", "."],
    "datasvc.loaders": [
        "augment profiling ranks",
        "core",
        "tokens decode_sharing decode",
        "torch images audio",
        "video",
    ],
    "datasvc.loaders.decode": [".", "gpu", "choice"],
    "datasvc.trainer": [
        "errors fast_imports env",
        "engine",
        "rendezvous",
        "launch.ranks",
        "elastic.driver",
        "launch job servers",
        "gradients",
        "ops",
        "optim",
        "function elastic functions compression optimizer sync_batch_norm",
        "runner common",
        "__init__",
        "mpi_ops",
    ],
    "datasvc.trainer.engine": ["negotiation", "execution", "."],
    "datasvc.trainer.elastic": ["driver", "."],
    "datasvc.trainer.recipes": [
        "layouts models optimizers reporting",
        "settings",
        "tasks",
        ".",
        "profiling servers",
        "planning",
    ],
    "datasvc.trainer.recipes.settings": ["groups", "."],
    "datasvc.trainer.recipes.profiling": ["measure", "."],
}


def files_of(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not _is_linked(path))


def _is_linked(path: Path) -> bool:
    return any((ROOT / part).is_symlink() for part in path.relative_to(ROOT).parents)


def module_of(path: Path) -> str:
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS.get(folder, folder), *parts])


MODULES = {module_of(path): path for folder in FOLDERS for path in files_of(folder)}
FILES = list(MODULES.values())
MAX_INTEGRATION_LINES = 250


def full_name(name: str) -> str | None:
    """Return the module that an imported name is, a package as its `__init__`; None for foreign ones."""
    return next((module for module in (name, f"{name}.__init__") if module in MODULES), None)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.is_relative_to(ROOT / "tools"), f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if full_name(name) else node.module for name in names}
    return frozenset(found)


def package_of(module: str) -> str:
    """Return the longest key of `ALLOWED` that holds `module`."""
    packages = [name for name in ALLOWED if module == name or module.startswith(f"{name}.")]
    return max(packages, key=len, default=module)


def floor_of(package: str, module: str) -> tuple[int, str]:
    """Return the line of `ROOMS[package]` that `module` is on, and its room there."""
    rest = module.removeprefix(f"{package}.")
    if rest == "__init__" and rest not in ROOMS[package]:
        return len(ROOMS[package]), rest
    for number, line in enumerate(ROOMS[package]):
        for room in sorted(line.split(), key=len, reverse=True):
            if rest == room or rest.startswith(f"{room}.") or (room == "." and "." not in rest):
                return number, room
    raise AssertionError(f"{module} is in no room of {package}; see ROOMS")


def violations(path: Path, module: str) -> list[str]:
    found = []
    for name in sorted(imports(path)):
        target = full_name(name)
        if name.split(".", maxsplit=1)[0] in ("loaders", "trainer", "tools", "tests"):
            found.append(f"{module} imports {name}")
        if target is None:
            continue
        own, other = package_of(module), package_of(target)
        if own != other and other not in ALLOWED[own]:
            found.append(f"{module} imports {target}")
        for package in ROOMS:
            if not (module.startswith(f"{package}.") and target.startswith(f"{package}.")):
                continue
            # The training program is a package of its own, on top of the trainer.
            if package == "datasvc.trainer" and own != "datasvc.trainer":
                continue
            mine, theirs = floor_of(package, module), floor_of(package, target)
            if mine[1] != theirs[1] and mine[0] <= theirs[0]:
                found.append(f"{module} imports {target} of a room that is not below its own in {package}")
    return found


def test_a_file_imports_only_rooms_below_its_own():
    assert [found for module, path in MODULES.items() for found in violations(path, module)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("datasvc.repository.logs.log", "from datasvc.shards import Shard"),
        ("datasvc.repository.store.storage", "from datasvc.repository.objects.objects import digest_of"),
        ("datasvc.cache.cache", "import datasvc.models"),
        ("datasvc.cache.fetch.fetch", "from datasvc.cache import Cache"),
        ("datasvc.models.tensors.chunks", "from datasvc.models.versions.commit import commit"),
        ("datasvc.order", "from datasvc import repository"),
        ("datasvc.loaders.images.image_loader", "import datasvc.trainer"),
        ("datasvc.loaders.images.image_loader", "import loaders"),
        ("datasvc.trainer.ops.collectives", "def f():\n    import datasvc.errors"),
        ("datasvc.shards.format.reader", "import tools.demo"),
    ],
)
def test_an_import_against_the_direction_is_found(module, line, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(line)
    assert violations(path, module)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tests", "tools", "examples"])
def test_programs_import_the_folders_by_their_package(folder):
    """`import loaders` works here, since the folder is in the root, and nowhere else."""
    assert [
        f"{path} imports {name}"
        for path in files_of(folder)
        for name in sorted(imports(path))
        if name.split(".", maxsplit=1)[0] in ("loaders", "trainer")
    ] == []


PICTURES = {"datasvc.views", "datasvc.drawing"}
# Imports each other inside functions: a process set submits, a submission has a process set.
CIRCLES = {"datasvc.trainer.job.process_sets", "datasvc.trainer.job.runtime", "datasvc.trainer.job.submit"}


def test_only_views_pages_and_commands_import_pictures():
    """Values reach theirs through `datasvc.shown`, which imports `datasvc.views` when one is shown."""
    above = {"datasvc.views", "datasvc.ui", "datasvc.cli"}
    assert {package for package, others in ALLOWED.items() if others & PICTURES} == above
    texts = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}
    assert [module for module, text in texts.items() if 'import_module("datasvc.views' in text] == ["datasvc.shown"]


def test_no_modules_import_each_other():
    """Not even inside functions or for annotations: none can be read alone then."""
    graph = {
        module: {full_name(name) for name in imports(path)} - {None, module} - CIRCLES
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")


def test_a_package_describes_its_role_and_is_not_too_large():
    for package in PACKAGES:
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))), package
        modules = [path for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
        assert len(modules) <= MAX_MODULES, package


def test_an_integration_is_small():
    sizes = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "datasvc/integrations").glob("*.py")}
    assert {name: size for name, size in sizes.items() if size >= MAX_INTEGRATION_LINES} == {}


def names_that_hide_modules(package: Path) -> set[str]:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    own = module_of(package / "__init__.py").removesuffix(".__init__")
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != own
        for alias in node.names
    }
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    modules = {path.stem for path in package.glob("*.py")} | {
        path.name for path in package.iterdir() if path.is_dir()
    }
    return names & modules


def test_no_public_name_hides_a_module():
    """Both would be one attribute of the package: which one is found would depend on earlier imports."""
    assert {package: hidden for package in PACKAGES if (hidden := names_that_hide_modules(package))} == {}


def test_importing_datasvc_loads_nothing_heavy():
    heavy = ("torch", "pyarrow", "numpy", "nvidia", "fsspec", "lmdb", "PIL", "aiohttp", "typer")
    code = f"import sys, datasvc; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_importing_the_training_program_loads_no_web_server_no_queries_and_no_optimizer_of_a_layout():
    unneeded = ("pandas", "pyarrow.dataset", "duckdb", "aiohttp", "torch.distributed.optim")
    code = f"import sys, datasvc.trainer.recipes.train; print([name for name in {unneeded!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_showing_a_data_set_of_a_local_repository_loads_nothing_that_it_does_not_need(tmp_path):
    small_dataset(str(tmp_path), "pets", samples=8)
    # pandas is imported by some functions of pyarrow where it is installed.
    unneeded = ("pandas", "pyarrow.compute", "rich", "tenacity", "duckdb", "torch", "PIL", "aiohttp", "lmdb", "s3fs")
    arguments = ["datasvc", "show", "pets", "--repo", str(tmp_path)]
    code = (
        f"import sys; sys.argv = {arguments!r}; from datasvc.cli.main import main\n"
        f"try: main()\nfinally: print([name for name in {unneeded!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == ("version: pets@1", "[]")

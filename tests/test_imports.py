"""The import directions of the house, and that `import datasvc` stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each room may import, beside itself. Rooms of one line may not import each other.
ALLOWED = {
    "datasvc.errors": set(),
    "datasvc.extras": set(),
    "datasvc.orphans": set(),
    "datasvc.processors": set(),
    "datasvc.progress": set(),
    "datasvc.durable": {"datasvc.errors"},
    "datasvc.keyed": {"datasvc.errors"},
    "datasvc.sizes": {"datasvc.errors"},
    "datasvc.spans": {"datasvc.keyed"},
    "datasvc.order": {"datasvc.errors", "datasvc.keyed", "datasvc.spans"},
    "datasvc.mix_order": {"datasvc.keyed", "datasvc.order"},
    "datasvc.repository": {"datasvc.errors", "datasvc.durable", "datasvc.extras"},
}
ALLOWED["datasvc.shards"] = {
    "datasvc.repository",
    "datasvc.order",
    "datasvc.keyed",
    "datasvc.durable",
    "datasvc.errors",
    "datasvc.extras",
    "datasvc.orphans",
    "datasvc.processors",
}
ALLOWED["datasvc.ledger"] = ALLOWED["datasvc.shards"] | {"datasvc.shards"}
ALLOWED["datasvc.cache"] = ALLOWED["datasvc.shards"] | {"datasvc.shards", "datasvc.sizes"}
ALLOWED["datasvc.models"] = ALLOWED["datasvc.shards"] | {"datasvc.shards", "datasvc.mix_order", "datasvc.sizes"}
ALLOWED["datasvc.gc"] = ALLOWED["datasvc.models"] | {"datasvc.models"}
ALLOWED["datasvc.cached_objects"] = (
    ALLOWED["datasvc.cache"] | ALLOWED["datasvc.models"] | {"datasvc.cache", "datasvc.models"}
)
ALLOWED["datasvc.restoring"] = ALLOWED["datasvc.cached_objects"] | {"datasvc.cached_objects"}
ALLOWED["datasvc.api"] = ALLOWED["datasvc.restoring"] | {"datasvc.restoring", "datasvc.gc"}
ALLOWED["datasvc.node"] = ALLOWED["datasvc.cache"] | {"datasvc.cache"}
ALLOWED["datasvc.cli"] = ALLOWED["datasvc.api"] | {
    "datasvc.api",
    "datasvc.node",
    "datasvc.ledger",
    "datasvc.progress",
}
ALLOWED["datasvc"] = {"datasvc.errors", "datasvc.api", "datasvc.shards"}
ALLOWED["loaders"] = {
    "datasvc.ledger",
    "datasvc.orphans",
    "datasvc.processors",
    "datasvc.durable",
    "datasvc.repository",
    "datasvc.shards",
    "datasvc.order",
    "datasvc.mix_order",
    "datasvc.keyed",
    "datasvc.cache",
    "datasvc.errors",
}
ALLOWED["trainer.recipes"] = {"trainer", "loaders", "datasvc"} | ALLOWED["datasvc.cli"]
ALLOWED["trainer.__main__"] = {"trainer", "trainer.recipes", "datasvc.errors"}
ALLOWED["trainer"] = set()
OURS = ("datasvc", "loaders", "trainer", "tools")


def room_of(module: str) -> str | None:
    """Return the longest room that holds `module`; None for foreign packages."""
    if module.split(".", maxsplit=1)[0] not in OURS:
        return None
    rooms = [room for room in ALLOWED if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=module)


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in names}
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(path: Path, module: str) -> list[str]:
    own = room_of(module)
    rooms = {target: room_of(target) for target in imports(path)}
    return [
        f"{module} ({own}) imports {target} ({room})"
        for target, room in sorted(rooms.items())
        if room is not None and room != own and room not in ALLOWED[own]
    ]


FILES = sorted(path for package in ("datasvc", "loaders", "trainer") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_rooms_below_its_own(path):
    assert violations(path, module_of(path)) == []


BUILDS = ("", "_listed", "_options", "_streamed")
INGEST = {"ingest", "ingest_commit", "plan", "dry_run", "engines", "check", *(f"build{end}" for end in BUILDS)}
VERSIONS = (
    "combine", "common_keys", "dataset", "delete", "deletions", "diff", "keys", "labels", "merge", "overview",
    "split_overlap", "table", "verify", "versions",
)  # fmt: skip


@pytest.mark.parametrize("name", VERSIONS)
def test_what_versions_are_made_of_imports_nothing_that_ingests(name):
    ingest = {f"datasvc.shards.{module}" for module in INGEST}
    assert not imports(ROOT / "datasvc" / "shards" / f"{name}.py") & ingest


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("datasvc.repository.log", "from datasvc.shards import Shard"),
        ("datasvc.cache.cache", "import datasvc.models"),
        ("datasvc.models.checkpoint", "from datasvc.cache import Cache"),
        ("datasvc.order", "from datasvc import repository"),
        ("loaders.image", "import trainer"),
        ("trainer.ops", "def f():\n    import datasvc.errors"),
        ("datasvc.shards.reader", "import tools.demo"),
    ],
)
def test_an_import_against_the_direction_is_found(module, line, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(line)
    assert violations(path, module)


def test_importing_datasvc_loads_nothing_heavy():
    heavy = ("torch", "pyarrow", "numpy", "nvidia", "fsspec", "lmdb", "PIL", "aiohttp", "typer")
    code = f"import sys, datasvc; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"

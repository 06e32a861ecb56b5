"""How long the first pages of `datasvc ui` take over very many versions, and the memory of its server.

Every repeat starts a new server, so that each page is the first of its kind. The versions are those of
`models_find.py`: some 30 settings and 6 metrics each. The time is that of the complete response to one request on the
loopback.

    python tools/bench/ui_pages.py [--repeats 5] [--versions 10000] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from models_find import write_versions
from report import Report, make_parser
from ui_server import UiServer, running_server

from datasvc.models.search.index import INDEX_PATH
from datasvc.repository import Repository

FIRST_PAGES = {
    "home": "/",
    "list of models": "/models",
    "model, newest versions": "/models/resnet",
    "model, versions in the middle": "/models/resnet@{middle}",
}
ALL_VERSIONS = {
    "metric over all versions, and make the index in memory": "/models/resnet?span=all",
    "metric over all versions": "/models/resnet?span=all&axis=version",
}


def load_ms(server: UiServer, path: str) -> float:
    """Return the milliseconds until a page is complete."""
    started = time.perf_counter()
    server.fetch(path)
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in (*FIRST_PAGES, *ALL_VERSIONS)}
    memory: dict[str, list[float]] = {"first pages": [], "all versions": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        url = f"{name}/repository"
        write_versions(Repository.create(url), range(1, arguments.versions + 1))
        for _ in range(arguments.repeats):
            Path(url, INDEX_PATH).unlink(missing_ok=True)
            with running_server(url, Path(name)) as server:
                for what, pages in zip(memory, (FIRST_PAGES, ALL_VERSIONS), strict=True):
                    for page, path in pages.items():
                        times[page].append(load_ms(server, path.format(middle=arguments.versions // 2)))
                    memory[what].append(server.peak_mb())
    report = Report(
        f"Pages of {arguments.versions:,} versions of a model, each the first of a new server",
        "The entries name tensors that do not exist, so the pages have no stored size.",
    )
    for page, values in times.items():
        report.add_row(page, "ms", values)
    for what, values in memory.items():
        report.add_row(f"peak memory of the server, {what}", "MB", values)
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()

"""Nothing on a page changes anything: neither does the server."""

import re

import pytest

from datasvc.models.search.index import INDEX_PATH
from tests.models.test_search import grow
from tests.ui.conftest import fill_repository, running_ui

# Beside what links lead to: pages that read the version index.
PATHS = ["/", "/models/m?span=all", "/datasets/pets?models=1", "/v1/models", "/v1/datasets/pets/versions/1/models"]
MAX_PAGES = 80


@pytest.fixture
def many(tmp_path):
    """URL of a repository with so many model versions that a query would store their index."""
    repo = fill_repository(tmp_path / "repo")
    grow(repo.repository, 40)
    return tmp_path / "repo"


@pytest.mark.slow
def test_no_file_of_a_repository_changes_when_its_pages_are_opened(many, tmp_path):
    before = snapshot(many)
    assert many / INDEX_PATH not in before
    with running_ui(many, thumbnails=tmp_path / "thumbnails") as server:
        queue, seen = list(PATHS), set(PATHS)
        for path in queue:
            status, _, text = server.get(path)
            assert status in {200, 404}, (path, text)
            links = re.findall(r'(?:href|src)="(/[^"#]*)', text) if "<html" in text else []
            for link in (found.replace("&amp;", "&") for found in links):
                if link not in seen and len(queue) < MAX_PAGES:
                    seen.add(link)
                    queue.append(link)
        assert len(queue) == MAX_PAGES
    assert snapshot(many) == before


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")
    }

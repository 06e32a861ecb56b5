"""The program that takes the pictures of the pages for the documentation."""

import sys
from types import SimpleNamespace

import pytest

from datasvc.shards import open_dataset
from tests.loaders.echo import EchoLoader, write_numbers
from tests.support.pages import ROOT
from tests.ui.conftest import running_ui


@pytest.fixture
def screenshots(monkeypatch):
    pytest.importorskip("playwright")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import screenshots

    yield screenshots
    del sys.modules["screenshots"]


def test_the_picture_of_an_audit_is_taken_of_a_proven_run_alone(screenshots, repository, tmp_path):
    write_numbers(repository, [8])
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    with running_ui(repository.url, ledgers=ledgers) as ui:
        server = SimpleNamespace(fetch=lambda path: ui.get(path)[2].encode())
        with pytest.raises(SystemExit, match="has no ledgers"):
            screenshots.find_audit(server, ledgers)
        split = open_dataset(repository, "numbers")["train"]
        for name in ("a", "b"):
            for rank in range(2):
                with EchoLoader(split, batch_size=2, rank=rank, world_size=2, ledger=ledgers / name) as loader:
                    assert len(list(loader)) == 2
        assert screenshots.find_audit(server, ledgers) == "/audit/a"
        (lost,) = (ledgers / "a").glob("*-rank1-of-*")
        lost.unlink()
        with pytest.raises(SystemExit, match="/audit/a does not say that no sample was lost"):
            screenshots.find_audit(server, ledgers)

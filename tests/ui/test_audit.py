"""The page of an audit."""

import json
from urllib.parse import quote

import pytest

import datasvc
from datasvc.ledger.file import RECORD_BYTES
from datasvc.runs import RunLog
from datasvc.ui.pages.audit import find_ledger_of
from tests.cli.command import run
from tests.loaders.echo import EchoLoader, write_numbers
from tests.ui.conftest import check_accessible, check_width, commands_of, running_ui, texts

EPOCHS = 40  # more rows than a window shows


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """The pages of a repository with three ledgers: a proven one, one that lost the file of a rank, a damaged one."""
    folder = tmp_path_factory.mktemp("audit")
    repo = datasvc.open(str(folder / "repo"), create=True)
    write_numbers(repo.repository, [25, 15])
    split = repo.dataset("numbers")["train"]
    ledgers = folder / "runs"
    for name in ("good", "team/lost", "damaged"):
        for rank in range(2):
            with EchoLoader(split, batch_size=6, rank=rank, world_size=2, ledger=ledgers / name) as loader:
                assert len(list(loader)) == 3
    (lost,) = (ledgers / "team/lost").glob("*-rank1-of-*")
    lost.unlink()
    (damaged,) = (ledgers / "damaged").glob("*-rank1-of-*")
    content = bytearray(damaged.read_bytes())
    content[-RECORD_BYTES + 20] ^= 1
    damaged.write_bytes(content)
    with running_ui(folder / "repo", ledgers=ledgers) as server:
        server.ledgers = ledgers
        yield server


@pytest.mark.parametrize("name", ["good", "team/lost", "damaged"])
def test_the_page_has_the_values_of_the_command(audited, name):
    repository = audited.settings.repository
    printed = json.loads(run("audit", audited.ledgers / name, "--json", "--repo", repository).stdout)
    assert audited.json(f"/audit/{quote(name, safe='')}", "audit") == printed


def test_a_proven_epoch_and_what_would_refute_it_are_told(audited):
    text = texts(audited.get("/audit/good")[2])
    assert "Proven: no sample of epoch 0 was lost or served twice" in text
    assert "36 of 40 served once, 4 dropped by the tail." in text
    assert f"by datasvc {datasvc.__version__}" in text
    assert audited.settings.repository in text
    assert str(audited.ledgers / "good") in text
    assert "What would refute it" in text
    one = audited.json("/audit/good?epoch=0", "audit")
    assert [epoch["epoch"] for epoch in one["epochs"]] == [0]
    assert audited.get("/audit/good?epoch=7")[0] == 404


def test_missing_samples_are_listed_by_key_with_a_link_to_their_lineage(audited):
    html = audited.get("/audit/team%2Flost")[2]
    assert "Not proven: 1 of 1 epochs" in texts(html)
    assert 'href="/lineage/numbers@1?key=' in html


def test_damage_is_a_problem_on_top(audited):
    html = audited.get("/audit/damaged")[2]
    assert "its checksum does not match" in texts(html).split("Audit of")[-2]


@pytest.mark.parametrize("name", ["..", "../repo", "/etc", "nothing", ".%00"])
def test_only_ledgers_of_the_folder_are_read(audited, name):
    assert audited.get(f"/audit/{quote(name, safe='')}")[0] in {404, 400}


def test_a_server_without_a_folder_of_ledgers_says_how_to_give_one(ui):
    status, _, html = ui.get("/audit/x")
    assert (status, "--runs FOLDER" in html) == (404, True)


def test_the_page_is_accessible_and_narrow(audited, page):
    for name in ("good", "team%2Flost"):
        page.goto(f"{audited.url}/audit/{name}")
        check_accessible(page)
        check_width(page)
        page.set_viewport_size({"width": 1280, "height": 800})


def test_a_long_audit_is_printed_whole(audited, page):
    split = datasvc.open(audited.settings.repository).dataset("numbers")["train"]
    with EchoLoader(split, batch_size=20, ledger=audited.ledgers / "long") as loader:
        for _ in range(EPOCHS):
            assert len(list(loader)) == 2
    page.goto(f"{audited.url}/audit/long")
    frame = page.get_by_role("group", name="Table: Positions of each epoch")
    is_clipped = "element => element.scrollHeight > element.clientHeight"
    assert frame.evaluate(is_clipped)  # it scrolls on the screen
    page.emulate_media(media="print")
    assert page.locator("header").is_hidden()
    assert frame.locator("tbody tr").count() == EPOCHS
    assert not frame.evaluate(is_clipped)
    assert frame.locator("thead").evaluate("head => getComputedStyle(head).position") == "static"


def test_the_page_of_runs_links_to_the_audits(audited):
    html = audited.get("/runs")[2]
    assert 'href="/audit/good"' in html
    assert 'href="/audit/team%2Flost"' in html


def test_the_page_of_a_run_links_to_the_audit_of_the_ledger_that_it_names(audited):
    with RunLog.open(audited.settings.repository, "cnn", config={"ledger": "runs/team/lost"}) as log:
        log.report("step", step=1, coverage=0.5)
    html = audited.get(f"/runs/{log.ref}")[2]
    assert 'href="/audit/team%2Flost"' in html
    assert "Epoch 0, from its ledger: not proven: 18 samples never" in " ".join(texts(html).split())


def test_the_coverage_of_a_live_run_is_that_of_its_ledger_and_not_of_the_program(audited):
    repo = datasvc.open(audited.settings.repository)
    ledger = audited.ledgers / "live"
    log = RunLog.open(repo.repository, "live", config={"ledger": str(ledger)}, flush_s=3600)
    log.report("step", step=1, epoch=7, coverage=0.99)  # of the program: another number, and another share
    loader = EchoLoader(repo.dataset("numbers")["train"], batch_size=5, rank=0, world_size=1, ledger=ledger)
    with log, loader:
        assert log.flush()
        for _, _batch in zip(range(2), loader, strict=False):
            pass
        path = f"/runs/{log.ref}"
        html = audited.get(path)[2]
        assert '<progress max="1" value="0.25"' in html
        text = " ".join(texts(html).split())
        assert "Epoch 0, from its ledger: 25.0 % reached; not finished: in the first 10 of 40 positions" in text
        assert "10 of 10 served once" in text
        command = commands_of(html)["ledger"]
        assert audited.json(path, "ledger") == json.loads(run(*command[1:]).stdout)
        next(iter(loader))
        assert "37.5 % reached" in audited.get(path)[2]
    with RunLog.open(repo.repository, "ended", config={"ledger": str(ledger)}) as log:
        log.report("step", step=1, coverage=0.0)
    html = audited.get(f"/runs/{log.ref}")[2]
    assert "<progress" not in html
    assert "Epoch 0, from its ledger: not finished: in the first 15 of 40 positions" in " ".join(texts(html).split())


def test_a_live_run_whose_ledger_cannot_be_read_says_why(audited):
    ledger = audited.ledgers / "empty"
    ledger.mkdir()
    (ledger / "00000001-rank0-of-1.ledger").write_bytes(b"")
    with RunLog.open(audited.settings.repository, "odd", config={"ledger": str(ledger)}, flush_s=3600) as log:
        assert log.flush()
        text = texts(audited.get(f"/runs/{log.ref}")[2])
    assert "The ledger shows no epoch" in text
    assert "has no files of a ledger" in text


def test_the_ledger_of_a_run_is_found_by_its_path(audited):
    folder = audited.ledgers
    for path, expected in {
        "runs/good": "good",
        "good": "good",
        "./good": "good",
        f"{folder}/team/lost": "team/lost",
        "lost": "team/lost",
        "team": None,
        "other/good": None,
        "/good": None,
        "../good": None,
        "\0": None,
        "": None,
    }.items():
        assert find_ledger_of(folder, {"decoding": {"ledger": path}}) == expected, path
    assert find_ledger_of(folder, {"ledger": 3}) is None
    assert find_ledger_of(folder, {}) is None
    assert find_ledger_of(None, {"ledger": "good"}) is None

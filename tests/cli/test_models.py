"""`datasvc models` as a user runs it, but in this process, which spares starting Python every time."""

import json

import pytest
import torch

from datasvc.cli.datasets.tags import parse_time
from datasvc.cli.main import make_app
from datasvc.cli.models.diff import _value_change
from datasvc.errors import ConfigError, ConflictError, DatasvcError, NotFoundError
from datasvc.models import CodeRevision, DataUse, save
from tests.drawing.hostile import parsed, text_of, with_class
from tests.models.entries import commit_entry


@pytest.fixture
def run(repository, capsys, monkeypatch):
    """Return a function that runs a command and gives what it printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*arguments):
        capsys.readouterr()
        make_app()(["models", *map(str, arguments), "--repo", repository.url], standalone_mode=False)
        return capsys.readouterr().out

    return run_command


@pytest.fixture
def run_json(run):
    return lambda *arguments: json.loads(run(*arguments, "--json"))


@pytest.fixture
def cnn(repository):
    """Five versions: a fork at 1 that is merged in 4."""
    commit_entry(repository, "base", step=9)
    commit_entry(repository, "cnn", step=100, parent="base@1", metrics={"acc": 0.5}, message="first")
    commit_entry(repository, "cnn", step=200, parent="cnn@1", metrics={"acc": 0.75})
    commit_entry(repository, "cnn", step=250, parent="cnn@1", metrics={"acc": 0.25})
    commit_entry(repository, "cnn", step=300, parent="cnn@2", merged=["cnn@3"], num_nonfinite={"w": 3})
    return repository


def test_the_log_is_a_graph_with_tags_and_removed_versions_marked(cnn, run):
    cnn.tag("models", "cnn@4", "prod")
    run("rm", "cnn@3", "-m", "worse")
    lines = run("log", "cnn").splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "* cnn@4", "|-.", "| * cnn@3", "* | cnn@2", "|-'", "* cnn@1", "o base@1",
    ]  # fmt: skip
    assert "[prod]" in lines[0]
    assert "NOT FINITE" in lines[0]
    assert "(removed)" in lines[2]
    assert lines[5].endswith("step 100  acc 0.5  first")
    assert run("log", "cnn", "--last", 1).splitlines()[0] == lines[0]
    assert "cnn@2" not in run("log", "cnn", "--last", 1)


def test_a_version_shows_its_parents_tags_and_what_is_not_finite(cnn, run, run_json):
    cnn.tag("models", "cnn@2", "prod"), cnn.tag("models", "cnn@4", "prod")
    shown = run("show", "cnn@4")
    assert "parent: cnn@2, cnn@3\n" in shown
    assert "tags: prod since 20" in shown
    assert ", before on 2\n" in shown
    assert 'NOT FINITE: {"w": 3}\n' in shown
    run("rm", "cnn@1", "-m", "old")
    assert "(old): only this metadata is left" in run("show", "cnn@1")
    assert run_json("show", "cnn@1")["removal"]["message"] == "old"
    with pytest.raises(NotFoundError, match=r"cnn@1 was removed on .* \(old\); cnn still has 2 to 4"):
        run("restore", "cnn@1", "nowhere")


@pytest.mark.slow
def test_tags_move_by_compare_and_set_and_tell_where_they_stood(cnn, run, run_json):
    assert run("tag", "cnn@1", "prod", "--expect", "none") == "cnn@prod is cnn@1\n"
    assert run("tag", "cnn@2", "prod", "--expect", "cnn@1") == "cnn@prod is cnn@2\n"
    with pytest.raises(ConflictError, match="points at version 2"):
        run("tag", "cnn@4", "prod", "--expect", 1)
    assert run("tag", "cnn") == "tag\tversion\nprod\tcnn@2\n"
    assert [move["version"] for move in run_json("tag", "cnn", "prod", "--history")] == [1, 2]
    assert run("tag", "cnn", "prod", "--history").splitlines()[1].startswith("~0\t2\t")
    assert run_json("tag", "cnn", "prod", "--at", "2100-01-01")["version"] == "cnn@2"
    with pytest.raises(NotFoundError, match=r"had no tag 'prod' at .*; its first move was"):
        run("tag", "cnn", "prod", "--at", "yesterday")
    for ref, expect, error in (
        ("cnn@1", (), ConflictError),
        ("cnn@99", (), NotFoundError),
        ("cnn@1", ("--expect", 2), ConfigError),
    ):
        with pytest.raises(error):
            run("tag", ref, "prod", "--remove", *expect)
    assert run("tag", "cnn") == "tag\tversion\nprod\tcnn@2\n"
    assert "history stays" in run("tag", "cnn", "prod", "--remove", "--expect", 2)
    run("tag", "cnn@2", "prod")
    assert "history stays" in run("tag", "cnn@2", "prod", "--remove")
    assert run("tag", "cnn", "prod", "--history").splitlines()[1].startswith("~0\tremoved\t")
    assert run_json("show", "cnn@prod~1")["version"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["tag", "cnn", "beta", "--history"], NotFoundError, "never had a tag 'beta'; it has: none yet"),
        (["tag", "cnn@1", "x", "--expect", "base@1"], ConfigError, "is not a version of cnn"),
        (["tag", "cnn", "--remove"], ConfigError, "give a tag"),
        (["tag", "cnn@1", "x", "--history"], ConfigError, "about all moves of a tag; give cnn instead of cnn@1"),
        (["tag", "cnn@1", "x", "--at", "yesterday"], ConfigError, "about all moves of a tag; give cnn instead"),
        (["tag", "cnn", "x", "--history", "--expect", "7"], ConfigError, "leave it out with --history and --at"),
        (["tag", "cnn", "x", "--at", "yesterday", "--expect", "7"], ConfigError, "leave it out"),
        (["tag", "cnn", "x", "--at", "noon"], ConfigError, "'noon' is not a valid time"),
        (["retain", "cnn"], ConfigError, "the retention policy keeps nothing"),
        (["retain", "cnn", "--best", "2"], ConfigError, "names no metric; give one"),
        (["retain", "cnn", "--best", "2", "--metric", "reward"], ConfigError, "give --mode max or --mode min"),
        (["rm", "cnn"], ConfigError, "names no version; expected a version or a tag"),
        (["show", "cnn@9"], NotFoundError, "cnn has no version 9; it has 1 to 4"),
        (["find", "metrics.acc >"], ConfigError, "syntax error"),
        (["sql", "drop view versions"], ConfigError, "not a single query"),
        (["sql", "select 1", "--csv", "--json"], ConfigError, "exclude each other"),
        (["gc", "--grace", "1h"], ConfigError, "--no-writers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_say_what_to_do(cnn, run, arguments, error, message):
    if "--at" in arguments:
        cnn.tag("models", "cnn@1", "x")
    with pytest.raises(error, match=message):
        run(*arguments)
    assert issubclass(error, DatasvcError)


@pytest.mark.parametrize("text", ["2026-11-21", "2026-11-21T00:00", "2026-11-21T02:00+02:00"])
def test_times_without_a_zone_are_utc(text):
    assert parse_time(text).timestamp() == 1795219200


def test_versions_are_found_and_ordered(cnn, run, run_json):
    found = run_json("find", "metrics.acc >= 0.5 and model = 'cnn'", "--by", "metrics.acc")
    assert [(each["version"], each["metrics"]) for each in found] == [(2, {"acc": 0.75}), (1, {"acc": 0.5})]
    assert len(run("find", "step > 0", "--limit", "2").splitlines()) == 3


def test_removed_versions_are_found_on_request_and_versions_are_queried(cnn, run, run_json):
    run("rm", "cnn@3", "-m", "worse")
    assert [each["version"] for each in run_json("find", "removed", "--removed")] == [3]
    query = "select model, max(version) newest from versions group by model order by model"
    assert run_json("sql", query) == [{"model": "base", "newest": 1}, {"model": "cnn", "newest": 4}]
    assert run("sql", query, "--csv") == "model,newest\nbase,1\ncnn,4\n"
    assert run("sql", query).partition("\n")[2] == "base\t1\ncnn\t4\n"


def test_the_best_by_a_loss_is_the_lowest(run_json, repository):
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], 1):
        save(repository, "net", {"step": step}, step=step, metrics={"val/loss": loss})
    found = run_json("retain", "net", "--best", 1, "--metric", "val/loss", "--yes")
    assert found["removed"] == [1, 3]
    assert found["kept"]["2"] == ["lowest val/loss"]


def test_retention_gives_a_reason_for_each_kept_version_and_removes_the_others_with_yes(cnn, run, run_json):
    rows = [line.split("\t") for line in run("retain", "cnn", "--last", 1, "--metric", "acc").splitlines()[1:]]
    assert [(row[0], row[3]) for row in rows] == [
        ("cnn@4", "newest, last 1"), ("cnn@3", "REMOVE"), ("cnn@2", "highest acc"), ("cnn@1", "REMOVE"),
    ]  # fmt: skip
    assert cnn.living("models", "cnn") == [1, 2, 3, 4]
    assert run_json("retain", "cnn", "--last", 1, "--metric", "acc", "--yes")["removed"] == [1, 3]
    assert cnn.living("models", "cnn") == [2, 4]
    assert run_json("gc", "--no-writers", "--grace", "0s", "--yes")["dry_run"] is False


@pytest.mark.slow
def test_several_versions_are_a_table_with_a_column_each(cnn, run, run_json):
    versions = ["cnn@1", "cnn@2", "base"]
    assert run("compare", *versions).splitlines()[1:] == ["step\t100\t200\t9", "metrics.acc\t0.5\t0.75\t-"]
    assert run("compare", *versions, "--csv").splitlines() == [
        "value,cnn@1,cnn@2,base@1", "step,100,200,9", "metrics.acc,0.5,0.75,",
    ]  # fmt: skip
    assert run_json("compare", *versions) == {
        "versions": ["cnn@1", "cnn@2", "base@1"],
        "values": [
            {"name": "step", "values": {"cnn@1": 100, "cnn@2": 200, "base@1": 9}},
            {"name": "metrics.acc", "values": {"cnn@1": 0.5, "cnn@2": 0.75}},
        ],
    }
    assert "code.dirty\tfalse\tfalse\tfalse\n" in run("compare", *versions, "--all")
    with pytest.raises(ConfigError, match="--csv and --json"):
        run("compare", *versions, "--csv", "--json")


def test_find_sorts_by_a_metric_without_a_condition(cnn, run):
    lines = run("find", "--by", "acc", "--limit", "2").splitlines()
    assert [line.split("\t")[0] for line in lines[1:]] == ["cnn@2", "cnn@1"]
    lines = run("find", "step < 300", "--by", "acc", "--ascending").splitlines()
    assert [line.split("\t")[0] for line in lines[1:]] == ["cnn@3", "cnn@1", "cnn@2", "base@1"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [(1, 3, "1 -> 3 (+2)"), (True, 3, "True -> 3"), (3, True, "3 -> True"), (False, True, "False -> True")],
)
def test_the_difference_of_numbers_is_shown_but_not_that_of_booleans(old, new, text):
    assert _value_change(old, new) == text


def test_two_versions_are_compared(repository, run, run_json):
    about = {"code": CodeRevision("abc", dirty=False), "environment": {}}
    use = DataUse("pets@1", "train", {"epoch": 1})
    save(repository, "m", {"w": torch.tensor([3.0, 4.0]), "old": torch.ones(1)}, step=1, config={"lr": 0.1}, **about)
    save(
        repository, "m", {"w": torch.tensor([3.0, 6.0]), "new": torch.ones(2, 3)}, step=5, config={"lr": 0.2},
        metrics={"acc": 0.5}, data=[use], **about,
    )  # fmt: skip
    shown = run("diff", "m@1", "m@2")
    for line in (
        "step: 1 -> 5 (+4)",
        "  + pets@1/train.epoch: 1",
        "  ~ lr: 0.1 -> 0.2 (+0.1)",
        "code: no difference",
        "tensors: 0 equal, 1 changed, 1 added, 1 removed, 0 of another dtype or shape",
        "  added new: float32[2, 3]",
        "  removed old: float32[1]",
        "  changed w: by 2, 0.4 of its norm, 1 of 2 elements",
    ):
        assert f"{line}\n" in shown
    facts = run_json("diff", "m@1", "m@2")
    assert facts["tensors"]["changes"][0]["norm"] == 2.0
    assert run("diff", "m@1", "m@2", "--no-norms").endswith("  changed w\n")


def test_the_log_as_a_picture_has_each_version_its_tags_and_a_hollow_removed_one(cnn, run, run_json, tmp_path):
    cnn.tag("models", "cnn@4", "prod")
    run("rm", "cnn@3", "-m", "worse")
    path = tmp_path / "cnn.svg"
    assert run("log", "cnn", "--svg", path) == ""
    root = parsed(path.read_text())
    texts = [text_of(node) for node in with_class(root, "node")]
    assert [text.split(",")[0] for text in texts] == ["cnn@4", "cnn@3", "cnn@2", "cnn@1", "base@1"]
    assert "prod" in texts[0]
    assert "(removed)" in texts[1]
    assert [len(with_class(node, "back")) for node in with_class(root, "node")] == [0, 1, 0, 0, 0]
    assert [version["version"] for version in run_json("log", "cnn", "--last", 1, "--svg", path)] == [4]
    assert len(with_class(parsed(path.read_text()), "node")) == 1
    with pytest.raises(NotFoundError, match=r"the folder .* does not exist; create it first"):
        run("log", "cnn", "--svg", tmp_path / "missing" / "cnn.svg")

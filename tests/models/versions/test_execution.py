"""How a run was executed: checked when it is made, in the entry, printed by `show`, found by `find`."""

import json

import pytest
import torch
from typer.testing import CliRunner

import datasvc
from datasvc.cli.main import make_app
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models import Execution, describe_model, save
from datasvc.models.versions.entry_fields import check_fields
from datasvc.trainer.recipes.servers.coordinate import describe_server_execution

STATE = {"w": torch.ones(2)}
HYBRID = Execution({"data": 2, "tensor": 4}, "hybrid", communication="all-reduce, reduce-scatter")


def run(*words):
    return CliRunner().invoke(make_app(), ["models", *words], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": {"tensor": 0}}, "layout has 'tensor': 0"),
        ({"layout": {"two words": 2}}, "layout has 'two words': 2"),
        ({"layout": {"data": True}}, "layout has 'data': True"),
        ({"parallelism": "both"}, "parallelism is 'both'; expected one of none, data, model, hybrid"),
        ({"consistency": "strict"}, "consistency is 'strict'; expected one of synchronous, bounded, asynchronous"),
        ({"topology": "ring"}, "topology is 'ring'; expected one of centralised, decentralised"),
        ({"communication": 3}, "communication is 3"),
        ({"sync": 8}, "sync is 8; expected a text such as 'local:8'"),
        ({"sync_steps": "8"}, "sync_steps is '8'; expected a number of steps"),
        ({"staleness": -1}, "staleness is -1; expected a number of steps, 0 or more, or None"),
    ],
)
def test_what_is_not_on_the_axes_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Execution(**wrong)


@pytest.mark.slow
def test_a_version_has_it_show_prints_it_and_find_filters_by_it(repository):
    save(repository, "net", STATE, step=1)
    save(repository, "net", STATE, step=2, execution=HYBRID)
    with datasvc.open(repository.url).models.manager("net") as model:
        model.save(STATE, step=3, execution=Execution({"data": 2}), wait=True)
    assert "execution" not in describe_model(repository, "net@1").entry
    entry = describe_model(repository, "net@2").entry
    assert entry["execution"] == {
        "layout": {"data": 2, "tensor": 4},
        "parallelism": "hybrid",
        "consistency": "synchronous",
        "topology": "decentralised",
        "communication": "all-reduce, reduce-scatter",
    }
    shown = run("show", "net@2", "--repo", repository.url).stdout
    assert "execution" in shown
    assert "hybrid" in shown
    assert "execution" not in run("show", "net@1", "--repo", repository.url).stdout
    for condition, versions in (
        ("execution.layout.tensor > 1", [2]),
        ("execution.consistency = 'synchronous'", [3, 2]),
        ("execution.layout.data = 2 and execution.parallelism = 'data'", [3]),
        ("execution.consistency is null", [1]),
    ):
        found = json.loads(run("find", condition, "--repo", repository.url, "--json").stdout)
        assert [version["version"] for version in found] == versions, condition
    assert datasvc.open(repository.url).models.diff("net@2", "net@3").values["execution"].changed["parallelism"] == (
        "hybrid",
        "data",
    )


@pytest.mark.slow
def test_find_filters_by_who_waits_for_whom_and_show_prints_it(repository):
    save(repository, "net", STATE, step=1, execution=Execution(sync="bsp", sync_steps=1))
    averaged = Execution(sync="diloco:32", sync_steps=32, outer_optimizer="nesterov", consistency="bounded")
    save(repository, "net", STATE, step=2, execution=averaged)
    save(repository, "net", STATE, step=3, execution=Execution(sync="local:8", sync_steps=8))
    for step, sync in ((4, "ssp:0"), (5, "ssp:3"), (6, "async")):
        save(repository, "net", STATE, step=step, execution=describe_server_execution(sync, 3, 2))
    entry = describe_model(repository, "net@2").entry
    check_fields(entry, "net@2")
    assert (entry["execution"]["sync"], entry["execution"]["sync_steps"]) == ("diloco:32", "32")
    for condition, versions in (
        ("execution.sync = 'local:8'", [3]),
        ("execution.sync_steps = 8", [3]),
        ("execution.sync_steps::int >= 8", [3, 2]),
        ("execution.outer_optimizer = 'nesterov'", [2]),
        ("execution.sync != 'bsp'", [6, 5, 4, 3, 2]),
        ("execution.staleness::int <= 3", [5, 4]),
        ("execution.staleness = 0", [4]),
    ):
        found = json.loads(run("find", condition, "--repo", repository.url, "--json").stdout)
        assert [version["version"] for version in found] == versions, condition
    shown = [run("show", f"net@{number}", "--repo", repository.url).stdout for number in (1, 2, 5)]
    assert "diloco:32 (steps of a round: 32, outer optimizer: nesterov)" in " ".join(shown[1].split())
    assert "steps of a round" not in shown[0]
    assert "ssp:3 (steps of a round: 1, steps ahead: 3)" in " ".join(shown[2].split())


def test_an_entry_of_a_wrong_form_is_named(repository):
    save(repository, "net", STATE, step=1, execution=HYBRID)
    entry = dict(describe_model(repository, "net").entry)
    check_fields(entry, "net@1")
    for wrong in ("data=2", {"layout": {"data": -1}}, {"layout": ["data"]}, {"topology": 3}):
        with pytest.raises(CorruptDataError, match=r"field 'execution' is .*; expected a layout of counts"):
            check_fields({**entry, "execution": wrong}, "net@1")
    check_fields({**entry, "execution": {"layout": {"data": 2}, "later": "text"}}, "net@1")


def test_rounds_of_a_tournament_are_a_field_of_the_entry_and_show_counts_them(repository):
    rounds = [{"step": 8, "round": 0, "pairs": [[1, 0]], "losses": [None, 0.5]}]
    played = Execution(sync="tournament:8", tournament={"rounds": rounds, "winner": 1, "losses": [0.7, 0.5]})
    save(repository, "net", STATE, step=9, execution=played)
    save(repository, "net", STATE, step=10, execution=Execution(tournament={"rounds": [{"round": 120}]}))
    save(repository, "net", STATE, step=11, execution=Execution())
    entry = describe_model(repository, "net@1").entry
    check_fields(entry, "net@1")
    assert entry["tournament"] == {"rounds": rounds, "winner": 1, "losses": [0.7, 0.5]}
    assert "tournament" not in entry["execution"]
    assert "1 round, the weights are those of rank 1" in run("show", "net@1", "--repo", repository.url).stdout
    assert "121 rounds" in run("show", "net@2", "--repo", repository.url).stdout
    assert "tournament" not in describe_model(repository, "net@3").entry
    with pytest.raises(ConfigError, match="tournament is a list"):
        Execution(tournament=rounds)

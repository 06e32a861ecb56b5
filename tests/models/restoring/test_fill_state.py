"""A restore into a state: its tensors are filled in place, all else comes from the version, nothing more is read."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.models import restore, save


class Pair(NamedTuple):
    first: Any
    second: Any


STATE = {
    "model": {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(3).bfloat16()},
    "optimizer": {"state": {0: {"step": torch.tensor(5.0), "seen": 7}}, "groups": [{"lr": 0.1, "params": [0, 1]}]},
    "pair": (torch.ones(2), {"x": 1}),
    "more": [torch.full((2,), 3.0)],
    "step": 5,
}


@pytest.fixture
def saved(repository):
    save(repository, "net", STATE, step=5)
    return repository


def test_tensors_are_filled_in_place_and_values_are_those_of_the_version(saved):
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    columns = torch.zeros(3, 2).T  # not contiguous
    into = {
        "model": {"w": weight, "b": torch.zeros(3).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, "groups": [{"lr": 0.0}]},
        "pair": (columns[0, :2], None),
        "more": None,
        "new": {"kept": 1},
        "step": None,
    }
    found = restore(saved, "net", into=into)
    state = found.state
    assert state["model"]["w"] is weight
    assert torch.equal(weight, STATE["model"]["w"])
    assert weight.requires_grad
    assert torch.equal(state["model"]["b"], STATE["model"]["b"])
    assert state["optimizer"]["state"][0] == {"step": torch.tensor(5.0), "seen": 7}
    assert state["optimizer"]["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert columns[0, :2].tolist() == [1.0, 1.0]
    assert state["pair"][1] == {"x": 1}
    assert state["more"][0].tolist() == [3.0, 3.0]
    assert state.keys() == into.keys()
    assert (state["step"], state["new"]) == (5, {"kept": 1})
    assert found.report.size_bytes == 12 * 4 + 3 * 2 + 4 + 2 * 4 + 2 * 4


def test_only_what_is_in_the_state_is_read(saved):
    assert restore(saved, "net", into={"model": {"b": torch.zeros(3).bfloat16()}}).report.size_bytes == 6
    assert restore(saved, "net", into={"step": None}).report.size_bytes == 0


def test_a_dict_in_place_of_a_list_reads_only_the_elements_with_its_numbers(repository):
    states = [{"w": torch.full((number + 1,), float(number))} for number in range(3)]
    save(repository, "ranks", {"ranks": states}, step=1)
    found = restore(repository, "ranks", into={"ranks": {1: None}})
    assert {number: state["w"].tolist() for number, state in found.state["ranks"].items()} == {1: [1.0, 1.0]}
    assert found.report.size_bytes == 2 * 4


def test_names_of_a_flattened_state_find_nested_tensors(saved):
    flat = {"model.w": torch.zeros(4, 3)}
    restore(saved, "net", into=flat)
    assert torch.equal(flat["model.w"], STATE["model"]["w"])


def test_what_does_not_fit_is_listed_and_nothing_is_changed(saved):
    into = {
        "model": {"w": torch.zeros(4, 3), "b": torch.zeros(3), "c": torch.zeros(1)},
        "more": [torch.zeros(3)],
        "step": torch.zeros(1),
    }
    with pytest.raises(ConfigError, match="2 missing, 0 unexpected, 2 of another dtype or shape") as caught:
        restore(saved, "net", into=into)
    lines = str(caught.value).splitlines()
    assert any(line.split() == ["model.b", "float32", "[3]", "bfloat16", "[3]"] for line in lines)
    assert into["model"]["w"].sum() == 0
    with pytest.raises(ConfigError, match=r"model\.w has no memory yet"):
        restore(saved, "net", into={"model": {"w": torch.zeros(4, 3, device="meta")}})
    with pytest.raises(ConfigError, match="no tensor matches 'model'"):
        restore(saved, "net", into={}, only=["model"])


def test_dicts_and_tuples_have_the_types_of_the_state_to_fill(repository):
    saved = {"model": OrderedDict(w=torch.ones(2)), "pair": Pair(torch.ones(1), {"x": 1}), "plain": (torch.ones(3),)}
    save(repository, "net", saved, step=0)
    into = {
        "model": {"w": torch.zeros(2)},
        "pair": Pair(torch.zeros(1), None),
        "plain": OrderedDict({0: torch.zeros(3)}),
    }
    state = restore(repository, "net", into=into).state
    assert [type(state[key]) for key in saved] == [dict, Pair, OrderedDict]
    assert state["pair"] == (torch.ones(1), {"x": 1})
    assert state["plain"][0].tolist() == [1.0] * 3
    assert state["model"]["w"].tolist() == [1.0] * 2


def test_tied_tensors_take_equal_values_only(repository):
    tied = torch.zeros(3)
    save(repository, "tied", {"a": torch.ones(3), "b": torch.ones(3)}, step=1)
    save(repository, "tied", {"a": torch.ones(3), "b": torch.zeros(3)}, step=2)
    restore(repository, "tied@1", into={"a": tied, "b": tied})
    assert tied.tolist() == [1.0] * 3
    with pytest.raises(ConfigError, match="'a' and 'b' share memory"):
        restore(repository, "tied@2", into={"a": tied, "b": tied})
    assert restore(repository, "tied@2", into={"b": tied}).state["b"].tolist() == [0.0] * 3


def test_a_large_tensor_is_read_by_the_chunks_that_a_part_overlaps(repository):
    whole = torch.arange(6_000_000.0)
    save(repository, "large", {"w": whole}, step=1, codec="none")
    into = {"w": torch.zeros(6_000_000)}
    assert restore(repository, "large", into=into).report.size_bytes == whole.nbytes
    assert torch.equal(into["w"], whole)

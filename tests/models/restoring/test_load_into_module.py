import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from datasvc.cache import Cache
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models import restore, save
from datasvc.models.restoring.load_into_module import load_into, load_version_into
from tests.models.every_kind import links_of
from tests.models.stored import flip_last_byte, object_file


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def network(out=2):
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, out))


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_network(repository, model):
    return str(save(repository, "net", {"model": model.state_dict(), "step": 3}, step=3))


def test_a_version_fills_a_model_through_the_cache_of_the_node_and_from_a_second_copy(repository, tmp_path):
    trained, cached, copied = network(), network(), network()
    ref = save_network(repository, trained)
    shutil.copytree(repository.url, tmp_path / "copy")
    folder = Path(repository.url, "objects")
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        load_version_into(repository, network(), ref, cache=cache)
        for digest in {link.object for link in links_of(repository, ref)}:
            (folder / digest[:2] / digest).unlink()
        with pytest.raises(NotFoundError, match="is missing"):
            load_version_into(repository, network(), ref)
        assert load_version_into(repository, cached, ref, cache=cache.folder).is_exact
    assert load_version_into(repository, copied, ref, fallback=str(tmp_path / "copy")).is_exact
    assert equal(values(cached), values(trained))
    assert equal(values(copied), values(trained))


def test_a_version_fills_a_model_of_its_architecture(repository):
    trained, fresh, other = network(), network(), network()
    ref = save_network(repository, trained)
    assert load_version_into(repository, fresh, ref).is_exact
    assert load_into(other, restore(repository, ref)).is_exact
    assert equal(values(fresh), values(trained))
    assert equal(values(other), values(trained))


def test_what_differs_is_told_in_a_table_and_nothing_is_loaded(repository):
    ref = save_network(repository, network(out=7).double())
    model = network().append(nn.Linear(2, 1))
    before = values(model)
    with pytest.raises(ConfigError) as told:
        load_version_into(repository, model, ref, cast=True)
    text = str(told.value)
    assert "net@1 does not fit Sequential, nothing was loaded" in text
    assert "2 missing, 0 unexpected, 2 of another dtype or shape" in text
    assert [line.split("  ") for line in text.splitlines() if "2.weight" in line] == [
        ["", "2.weight", "float32 [2, 3]", "float64 [7, 3]"]
    ]
    with pytest.raises(ConfigError, match=r"0.weight .*float32 .*float64"):
        load_version_into(repository, network(out=7), ref)
    assert equal(values(model), before)


def test_not_strict_loads_what_fits_and_reports_the_rest(repository):
    trained = network(out=7)
    state = {"model": {**trained.state_dict(), "extra": torch.ones(1)}}
    model = network()
    before = values(model)
    report = load_into(model, state, strict=False)
    assert (list(report.missing), list(report.unexpected)) == ([], ["extra"])
    assert [each.name for each in report.mismatched] == ["2.weight", "2.bias"]
    after = values(model)
    assert torch.equal(after["0.weight"], trained.state_dict()["0.weight"])
    assert torch.equal(after["2.weight"], before["2.weight"])


def test_names_are_mapped_and_dtypes_cast_where_asked(repository):
    trained = network().double()
    ref = str(save(repository, "net", {"ema": {f"module.{k}": v for k, v in trained.state_dict().items()}}, step=0))
    model = network()
    assert load_version_into(repository, model, ref, prefix="ema", rename={"module": ""}, cast=True).is_exact
    assert torch.equal(model[0].weight, trained[0].weight.float())
    with pytest.raises(ConfigError, match="no tensor is below 'model'; the state has: ema"):
        load_version_into(repository, model, ref)


def test_one_of_two_tied_tensors_is_enough():
    trained, model = Tied(), Tied()
    state = trained.state_dict()
    del state["head.weight"]
    assert load_into(model, state, prefix="").is_exact
    assert torch.equal(model.head.weight, trained.embed.weight)


def test_only_what_the_model_takes_is_read_and_damage_changes_nothing(repository):
    state = {"model": network().state_dict(), "optimizer": torch.randn(40_000)}
    save(repository, "net", state, step=0)
    object_file(repository, "net", "optimizer").unlink()
    model = network()
    load_version_into(repository, model, "net")
    before = values(model)
    flip_last_byte(object_file(repository, "net", "model.0.weight"))
    with pytest.raises(CorruptDataError, match="model"):
        load_version_into(repository, model, "net")
    assert equal(values(model), before)


def test_a_model_without_memory_or_shapes_is_refused():
    with torch.device("meta"):
        meta = network()
    with pytest.raises(ConfigError, match="has no memory yet"):
        load_into(meta, {"model": network().state_dict()})
    with pytest.raises(ConfigError, match="has no shape yet"):
        load_into(nn.LazyLinear(3), {"model": network().state_dict()})


class Refuses(nn.Module):
    """Looks at its part of a state, after the modules before it were filled."""

    _version = 3

    def __init__(self, error=None):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.seen = []
        self.b._register_load_state_dict_pre_hook(self.look)
        self.error = error

    def look(self, _state, _prefix, metadata, *_):
        self.seen.append(metadata.get("version"))
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError])
def test_a_model_that_refuses_in_the_middle_is_as_it_was(error):
    model = Refuses(error("no thanks"))
    before = values(model)
    with pytest.raises(ConfigError, match="cannot be loaded into Refuses: no thanks"):
        load_into(model, {"model": Refuses().state_dict()})
    assert equal(values(model), before)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        load_into(model, {"model": Refuses().state_dict()})
    assert equal(values(model), before)


def test_modules_are_told_their_own_version(repository):
    model = Refuses()
    load_into(model, {"model": Refuses().state_dict()})
    assert model.seen == [nn.Linear._version]


@pytest.mark.parametrize("stored", [True, False])
def test_two_values_for_one_tied_tensor_are_a_mismatch(repository, stored):
    model, state = Tied(), {name: tensor.clone() for name, tensor in Tied().state_dict().items()}

    def load(**how):
        if not stored:
            return load_into(model, {"model": state}, **how)
        return load_version_into(repository, model, str(save(repository, "net", {"model": state}, step=0)), **how)

    assert load().is_exact
    state["head.weight"] += 1
    with pytest.raises(ConfigError, match=r"head.weight .*float32 \[5, 3\], other values than embed.weight"):
        load()
    report = load(strict=False)
    assert (report.loaded, report.mismatched[0].tied_to) == (("embed.weight",), "embed.weight")
    assert torch.equal(model.head.weight, state["embed.weight"])


def test_a_prefix_of_dots_is_none_and_names_cannot_command_a_terminal():
    assert load_into(nn.Linear(2, 1), nn.Linear(2, 1).state_dict(), prefix=".").is_exact
    with pytest.raises(ConfigError) as told:
        load_into(nn.Linear(2, 1), {"\x1b[2Jx": torch.ones(1), **nn.Linear(2, 1).state_dict()}, prefix="")
    assert "\x1b" not in str(told.value)
    assert "x1b[2Jx" in str(told.value)


def test_a_cast_that_would_make_infinities_is_refused():
    model, state = nn.Linear(2, 1).half(), nn.Linear(2, 1).state_dict()
    state["weight"][0, 0] = 1e6
    before = values(model)
    with pytest.raises(ConfigError, match="1 of 2 numbers of tensor 'weight' are too large for float16"):
        load_into(model, state, prefix="", cast=True)
    assert equal(values(model), before)
    state["weight"][0, 0] = float("inf")
    assert load_into(model, state, prefix="", cast=True).is_exact

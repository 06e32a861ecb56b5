import pytest

from datasvc.errors import ConfigError, NotFoundError, UnreadableVersionWarning
from datasvc.models.registry.compare import compare_versions
from tests.models.entries import commit_entry


@pytest.fixture
def three(repository):
    commit_entry(repository, "cnn", step=1, config={"lr": 0.1, "net": {"depth": 18}, "amp": True}, data=["pets@1"])
    commit_entry(
        repository, "cnn", step=2, config={"lr": 0.1, "net": {"depth": 18}, "amp": 1}, data=["pets@3"],
        metrics={"top1": 0.5}, code={"revision": "abc", "dirty": True},
    )  # fmt: skip
    commit_entry(repository, "vit", step=1, config={"lr": 0.2, "net": {}}, metrics={"top1": 0.5})
    return repository


def test_only_the_values_that_differ_are_returned_by_part(three):
    result = compare_versions(three, ["cnn@1", "cnn@2", "vit"])
    assert result.versions == ("cnn@1", "cnn@2", "vit@1")
    rows = {row.name: row.values for row in result.values}
    assert rows == {
        "step": {"cnn@1": 1, "cnn@2": 2, "vit@1": 1},
        "config.lr": {"cnn@1": 0.1, "cnn@2": 0.1, "vit@1": 0.2},
        "config.net.depth": {"cnn@1": 18, "cnn@2": 18},
        "config.amp": {"cnn@1": True, "cnn@2": 1},
        "config.net": {"vit@1": {}},
        "metrics.top1": {"cnn@2": 0.5, "vit@1": 0.5},
        "data.pets/train.dataset": {"cnn@1": "pets@1", "cnn@2": "pets@3"},
        "code.revision": {"cnn@1": None, "cnn@2": "abc", "vit@1": None},
        "code.dirty": {"cnn@1": False, "cnn@2": True, "vit@1": False},
    }
    parts = [name.partition(".")[0] for name in rows]
    assert parts == sorted(parts, key=["step", "config", "metrics", "data", "code"].index)


def test_equal_values_are_returned_on_request_and_a_version_is_compared_once(three):
    three.tag("models", "cnn@1", "prod")
    names = {row.name for row in compare_versions(three, ["cnn@1", "cnn@2", "cnn@prod"], equal=True).values}
    assert {"config.lr", "config.net.depth"} < names
    with pytest.raises(ConfigError, match="expected two or more versions to compare, found cnn@1"):
        compare_versions(three, ["cnn@1", "cnn@prod"])
    with pytest.raises(NotFoundError, match="no version 9"):
        compare_versions(three, ["cnn@1", "cnn@9"])


def test_data_uses_of_one_data_set_are_told_apart(three):
    uses = [
        {"dataset": "pets@1", "split": "train", "state": {"epoch": 1, "version": "a" * 64}},
        {"dataset": "pets@2", "split": "train", "state": {"epoch": 2}},
        {"dataset": "pets@1", "split": "train", "state": {}, "purpose": "evaluation"},
        {"dataset": "a@1, b@2", "split": "train", "state": {}},
    ]
    version = commit_entry(three, "cnn", data=[])
    content = three.entry(three.resolve("models", version)).content
    three.versions("models", "two").append(lambda _head: {**content, "data": uses})
    rows = {row.name: row.values for row in compare_versions(three, [version, "two"]).values}
    assert rows == {
        name: {"two@1": value}
        for name, value in {
            "data.pets/train.dataset": "pets@1",
            "data.pets/train.epoch": 1,
            "data.pets@2/train.dataset": "pets@2",
            "data.pets@2/train.epoch": 2,
            "data.pets/train (evaluation).dataset": "pets@1",
            "data.a, b/train.dataset": "a@1, b@2",
        }.items()
    }


def test_every_use_of_two_versions_of_a_data_set_is_compared_in_any_order(three):
    uses = [
        {"dataset": f"pets@{number}", "split": "train", "state": {"epoch": number}, "purpose": purpose}
        for number in (1, 2)
        for purpose in ("training", "evaluation")
    ]
    uses.append(uses[2] | {"state": {"epoch": 2}, "run": "abcd"})
    version = commit_entry(three, "cnn", data=[])
    content = three.entry(three.resolve("models", version)).content
    for name, order in (("there", uses), ("back", uses[::-1])):
        three.versions("models", name).append(lambda _head, order=order: {**content, "data": order})
    rows = {row.name: row.values for row in compare_versions(three, ["there", "back"], equal=True).values}
    assert {name: values for name, values in rows.items() if name.endswith("epoch")} == {
        f"data.{use}.epoch": {"there@1": epoch, "back@1": epoch}
        for use, epoch in {
            "pets/train": 1,
            "pets@2/train": 2,
            "pets@2/train #2": 2,
            "pets/train (evaluation)": 1,
            "pets@2/train (evaluation)": 2,
        }.items()
    }


def test_a_version_that_cannot_be_read_is_left_out_with_a_warning(three):
    three.storage.local_path("models/cnn/versions/00000002.json").write_bytes(b"damage")
    with pytest.warns(UnreadableVersionWarning, match="cnn@2 is left out"):
        assert compare_versions(three, ["cnn@1", "cnn@2", "vit"]).versions == ("cnn@1", "vit@1")

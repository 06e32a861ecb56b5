import pytest

from datasvc.errors import ConfigError, NotFoundError, UnreadableVersionWarning
from datasvc.models.registry.retention import remove
from datasvc.testing import small_dataset
from tests.models.entries import commit_entry


@pytest.fixture
def scored(repository):
    """Five versions of `cnn`, of which the last is removed."""
    for metrics in (
        {"loss": 0.5, "val/top-1": 0.2, "odd:name": 1},
        {"loss": 0.25, "val/top-1": 0.4, "reward": 1.0},
        {"loss": 0.25, "val/top-1": 0.3, "reward": -1.0},
        {"loss": "nan", "val/top-1": True, "reward": 10**400},
        {"loss": 0.1, "val/top-1": 0.9},
    ):
        commit_entry(repository, "cnn", metrics=metrics)
    remove(repository, ["cnn@5"])
    return repository


@pytest.mark.parametrize(
    ("ref", "number"),
    [
        ("cnn@latest", 4),
        ("cnn@best:loss", 3),
        ("cnn@best:loss:max", 1),
        ("cnn@best:val/top-1", 2),
        ("cnn@best:reward:max", 2),
        ("cnn@best:reward:min", 3),
        ("cnn@best:odd:name:min", 1),
    ],
)
def test_a_reference_names_the_newest_or_the_best_living_version(scored, ref, number):
    assert scored.resolve("models", ref).version == number
    assert scored.resolve_with_state("models", ref)[0].version == number


def test_the_best_version_is_found_by_name_and_metric(scored):
    assert str(scored.best("cnn", "loss")) == "cnn@3"
    assert str(scored.best("cnn", "reward", mode="max")) == "cnn@2"
    assert str(scored.best("cnn", "odd:name", mode="max")) == "cnn@1"
    with pytest.raises(ConfigError, match="'up' is not a valid mode"):
        scored.best("cnn", "loss", mode="up")
    with pytest.raises(ConfigError, match="not a valid name"):
        scored.best("cnn@1", "loss")


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_no_new_tag_is_called_latest(scored, kind):
    if kind == "datasets":
        small_dataset(scored, "cnn", samples=4)
    with pytest.raises(ConfigError, match=r"cnn@latest means the newest version, so 'latest' cannot be a new tag"):
        scored.tag(kind, "cnn@1", "latest")
    assert scored.tags(kind, "cnn") == {}


def test_a_tag_that_was_called_latest_before_wins_until_it_is_removed(scored):
    scored._tags("models", "cnn").move("latest", 2)
    scored.tag("models", "cnn@1", "latest")
    scored.tag("models", "cnn@2", "best")
    assert [scored.resolve("models", f"cnn@{tag}").version for tag in ("latest", "best", "latest~0")] == [1, 2, 1]
    scored.untag("models", "cnn", "latest")
    assert scored.resolve("models", "cnn@latest").version == 4
    assert scored.resolve("models", "cnn@latest~1").version == 1


def test_what_has_no_best_version_is_an_error(scored):
    with pytest.raises(
        NotFoundError, match=r"finite metric 'los', so none is the best; there are: loss, odd:name, rew"
    ):
        scored.resolve("models", "cnn@best:los")
    with pytest.raises(ConfigError, match=r"write cnn@best:reward:max or cnn@best:reward:min"):
        scored.resolve("models", "cnn@best:reward")
    with pytest.raises(NotFoundError, match="no model 'vit'"):
        scored.resolve("models", "vit@best:loss")
    with pytest.raises(ConfigError):
        scored.resolve("models", "cnn@best:")
    with pytest.raises(NotFoundError, match="no tag 'best'"):
        scored.resolve("models", "cnn@best")
    with pytest.raises(ConfigError, match="not a valid name of a tag"):
        scored.tag("models", "cnn@1", "best:loss")
    remove(scored, ["cnn@1", "cnn@2", "cnn@3", "cnn@4"])
    with pytest.raises(NotFoundError, match="was removed"):
        scored.resolve("models", "cnn@latest")


def test_data_sets_have_a_latest_version_and_no_best_one(scored):
    scored.versions("datasets", "pets").append(lambda _head: {})
    assert str(scored.resolve("datasets", "pets@latest")) == "pets@1"
    with pytest.raises(ConfigError, match="data-set versions have no metrics"):
        scored.resolve("datasets", "pets@best:loss")


def test_a_version_that_cannot_be_read_is_named_and_left_out(scored):
    path = scored.storage.local_path("models/cnn/versions/00000003.json")
    path.write_bytes(b"damage")
    with pytest.warns(UnreadableVersionWarning, match="cnn@3"):
        assert str(scored.resolve("models", "cnn@best:loss")) == "cnn@2"

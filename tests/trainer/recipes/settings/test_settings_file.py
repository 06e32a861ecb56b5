import json

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.options import parse_options
from datasvc.trainer.recipes.settings.presets import PRESETS, read_settings

WORDS = ["--data", "d@1", "--repo", "r", "--name", "m"]


@pytest.fixture
def written(tmp_path):
    """Writes a file; returns its path."""

    def write(text, name="run.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_file_has_the_types_of_the_fields(written):
    path = written(
        "epochs: 3\nlearning-rate: 1e-4\nflip: 1\nnesterov: true\nmilestones: ['30:0.1']\nscale: [0.5, 1]\n"
        "block: null\nmodel_option: dropout=0.1\n"
    )
    assert read_settings(path) == {
        "epochs": 3,
        "learning_rate": 1e-4,
        "flip": 1.0,
        "nesterov": True,
        "milestones": ("30:0.1",),
        "scale": (0.5, 1.0),
        "block": None,
        "model_option": ("dropout=0.1",),
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", json.dumps({"epochs": 3, "betas": [0.8, 0.9]})),
        ("run.toml", "epochs = 3\nbetas = [0.8, 0.9]\n"),
        ("run.yml", "epochs: 3\nbetas: [0.8, 0.9]\n"),
    ],
)
def test_a_file_is_yaml_json_or_toml(written, name, text):
    assert read_settings(written(text, name)) == {"epochs": 3, "betas": (0.8, 0.9)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1\n", "'learning_rat', which does not exist; did you mean 'learning_rate'"),
        ("qqqq: 1\n", "'qqqq', which does not exist; --help lists"),
        ("lanes: 1\nepochs: many\n", "epochs is 'many': expected a whole number in .*run.yaml"),
        ("epochs: true\n", "epochs is True: expected a whole number"),
        ("nesterov: 1\n", "nesterov is 1: expected true or false"),
        ("name: 3\n", "name is 3: expected a string in .*; put it into quotes"),
        ("data: null\n", "data is None: expected a string"),
        ("scale: [1]\n", "expected a list of 2 values"),
        ("flip: often\n", "flip is 'often': expected a number"),
        ("batch_size: 1\nbatch-size: 2\n", "'batch_size' twice"),
        ("epochs: 1\nlanes: 1\nepochs: 2\n", "cannot read .*run.yaml: it has 'epochs' twice; remove one of them"),
        ("- epochs\n", "has a list; expected settings"),
        ("epochs: [\n", "cannot read .*run.yaml"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_what_was_expected(written, text, message):
    with pytest.raises(ConfigError, match=message):
        parse_options([*WORDS, "--config", written(text)])


@pytest.mark.parametrize(
    ("name", "text"), [("run.json", '{"epochs": 1, "epochs": 2}'), ("run.toml", "epochs = 1\nepochs = 2\n")]
)
def test_a_setting_twice_is_refused_in_every_format(written, name, text):
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: "):
        read_settings(written(text, name))


def test_a_yaml_file_may_override_the_settings_that_it_merges(written):
    path = written("<<: &few {epochs: 1, lanes: 2}\nepochs: 3\n")
    assert read_settings(path) == {"epochs": 3, "lanes": 2}


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.yaml: No such file"):
        parse_options([*WORDS, "--config", "nowhere.yaml"])


def test_an_option_overrides_the_file_which_overrides_preset_variable_and_default(written):
    path = written("preset: goyal2017\nepochs: 3\nmomentum: 0.8\nrepo: /file\n")
    environ = {"DATASVC_REPO": "/variable", "DATASVC_CACHE": "/cache"}
    options = parse_options(["--data", "d", "--name", "m", "--config", path, "--momentum", "0.7"], environ=environ)
    sources = {name: (setting.value, setting.source) for name, setting in options.settings.items()}
    assert sources["momentum"] == (0.7, "command line")
    assert sources["epochs"] == (3, f"file {path}")
    assert sources["repo"] == ("/file", f"file {path}")
    assert sources["nesterov"] == (True, "preset goyal2017: section 5.1")
    assert sources["cache"] == ("/cache", "variable DATASVC_CACHE")
    assert sources["seed"] == (0, "default")
    assert options.config().optimizer == "sgd"
    assert parse_options([*WORDS, "--config", path, "--preset", "you2017"]).config().optimizer == "lars"


def test_a_batch_size_replaces_the_global_batch_of_what_it_overrides(written):
    path = written("preset: goyal2017\nbatch_size: 16\n")
    assert parse_options([*WORDS, "--config", path]).config().global_batch is None
    path = written("global_batch: 64\nbatch_size: 16\n")
    assert parse_options([*WORDS, "--config", path]).config().global_batch == 64
    assert parse_options([*WORDS, "--config", path, "--batch-size", "8"]).config().global_batch is None


@pytest.mark.parametrize("preset", PRESETS)
def test_the_configuration_shown_as_yaml_is_read_back_as_the_same(written, preset):
    words = [*WORDS, "--preset", preset, "--weight-decay", "1e-5", "--cache", "/a: 'b' #c é"]
    shown = parse_options([*words, "--show-config=yaml"], environ={})
    read = parse_options(["--config", written(shown.describe())], environ={})
    assert read.config() == shown.config()


def test_the_yaml_form_leaves_out_what_is_missing():
    shown = parse_options(["--show-config", "yaml"], environ={}).describe()
    assert "# data: required" in shown.splitlines()

"""Options and files of settings of a training: what is given counts as it is written, or is refused."""

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.options import parse_options

REQUIRED = ["--data", "digits@1", "--repo", "repo", "--name", "net"]


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        parse_options([*REQUIRED, *words], environ={})
    assert ended.value.code == 2
    return capsys.readouterr().err


def settings(*words, text=None, folder=None):
    if text is not None:
        (folder / "run.yaml").write_text(text)
        words = ("--config", str(folder / "run.yaml"), *words)
    options = parse_options([*REQUIRED, *words], environ={})
    return {name: setting.value for name, setting in options.settings.items()}


@pytest.mark.parametrize("word", ["--stop-on", "--learning", "--vocab"])
def test_the_beginning_of_an_option_is_not_the_option(capsys, word):
    """brentyi/tyro#45, adobe-apiplatform/user-sync.py#5, freedomofpress/securedrop-workstation#1071: a typo."""
    assert f"unrecognized arguments: {word}" in refusal(capsys, word)


@pytest.mark.parametrize(
    ("option", "first", "second"),
    [("--data", "a@1:0.5", "b@1:0.5"), ("--milestones", "30:0.1", "60:0.1")],
)
def test_the_second_of_two_lists_does_not_replace_the_first(capsys, option, first, second):
    """MFlowCode/MFC#1883, neithere/argh#100: the run trained on the last data set alone, without a word."""
    assert f"argument {option}: given twice" in refusal(capsys, option, first, option, second)
    once = [*REQUIRED[2:], "--data", "a@1:0.5", "b@1:0.5"]
    assert parse_options(once, environ={}).settings["data"].value == "a@1:0.5 b@1:0.5"


def test_the_last_of_two_numbers_counts():
    """The neighbour of the fault above: scripts put what they are given behind their own options."""
    assert settings("--epochs", "2", "--epochs", "3")["epochs"] == 3


@pytest.mark.parametrize("words", [("--stop-on-nan=false",), ("--stop-on-nan", "False"), ("--documents=0",)])
def test_a_switch_with_a_value_is_refused_and_not_on(capsys, words):
    """tensorflow/tensorflow#379, huggingface/transformers#9224: `--flag=False` turned the flag on."""
    assert refusal(capsys, *words)
    assert (settings("--no-stop-on-nan")["stop_on_nan"], settings("--stop-on-nan")["stop_on_nan"]) == (False, True)


def test_a_default_does_not_replace_what_the_file_has(tmp_path):
    """ScrollPrize/villa#1489, Goekdeniz-Guelmez/mlx-lm-lora#74: 50 epochs in the file, and 1,000 were trained."""
    found = settings("--batch-size", "3", text="epochs: 7\nstop_on_nan: true\n", folder=tmp_path)
    assert (found["epochs"], found["stop_on_nan"], found["batch_size"]) == (7, True, 3)


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "0.00002", "'2e-5'"])
def test_a_rate_in_scientific_notation_is_a_number(tmp_path, text):
    """hiyouga/LlamaFactory#4014, MichiganCOG/ViP#8: YAML 1.1 reads 2e-5 as text."""
    assert settings(text=f"learning_rate: {text}\n", folder=tmp_path)["learning_rate"] == 2e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 010", "YAML reads 010 as a number of base 8"),
        ("seed: 0644", "base 8"),
        ("momentum: 1:30", "YAML reads 1:30 as a number of base 60"),
        ("milestones: [30:0.1]", "YAML reads 30:0.1 as a number of base 60"),
    ],
)
def test_a_number_that_yaml_reads_in_another_base_is_refused(tmp_path, text, message):
    """yaml/pyyaml#107, kynema/kynema-ugf#584, yaml/pyyaml#395: 010 iterations were 8."""
    with pytest.raises(ConfigError, match=message):
        settings(text=text, folder=tmp_path)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("10", 10), ("0x10", 16), ("1_000", 1000)])
def test_other_numbers_are_read_as_before(tmp_path, text, value):
    """The neighbours of the fault above."""
    assert settings(text=f"seed: {text}\n", folder=tmp_path)["seed"] == value


@pytest.mark.parametrize("name", ["no", "12", "2026-11-29"])
def test_a_name_that_yaml_takes_for_something_else_is_refused(tmp_path, name):
    """huggingface/huggingface_hub#797: `no` was False."""
    with pytest.raises(ConfigError, match="put it into quotes"):
        settings(text=f"name: {name}\n", folder=tmp_path)


@pytest.mark.parametrize("words", [("--seed", "-1"), ("--seed=-1",), ("--epochs", "-3")])
def test_a_negative_number_is_a_value_and_not_an_option(words):
    """pallets/click#1624, 75lb/command-line-args#10: "no such option: -1"."""
    with pytest.raises(ConfigError, match=r"is -\d; expected"):
        parse_options([*REQUIRED, *words], environ={}).config()

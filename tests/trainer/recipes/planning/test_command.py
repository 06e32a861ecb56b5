"""The command line of `plan`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.errors import ConfigError
from datasvc.planning.layout import AXES
from datasvc.planning.layout_step import ComputeTimes
from datasvc.trainer.recipes.planning.command import MeasuredStep, main, parse_rate, read_measured
from datasvc.trainer.recipes.settings.config import TrainConfig
from tests.cli.command import run
from tests.planning.examples import EXAMPLE

ROOT = Path(__file__).parents[4]
GPT = ["--vocabulary", "64", "--model-option", "layers=4", "heads=2", "width=16", "context=32"]
RATE = ["--flops", "1TFLOP/s"]


def plan(capsys, *words):
    main([*GPT, *words])
    return capsys.readouterr().out


def test_the_ranking_is_printed_as_a_table(capsys):
    out = plan(capsys, *RATE, "--nodes", "2", "--gpus", "2", "--global-batch", "16", "--top", "3")
    assert out.startswith("gpt, 0.0 M parameters, fp32; 16 blocks per step\nnumber of nodes: 2; nodes of 2 ranks, ")
    assert "and 11 more that fit" in out
    assert "\nbest: --layout " in out


def test_json_has_an_object_for_each_number_of_nodes(capsys):
    out = plan(capsys, *RATE, "--nodes", "1", "2", "--ranks-per-node", "2", "--batch-size", "4", "--json")
    first, second = json.loads(out)
    assert (first["num_nodes"], second["num_nodes"], second["ranks_per_node"]) == (1, 2, 2)
    # Without --global-batch every rank has --batch-size samples.
    assert (first["global_batch"], second["global_batch"]) == (8, 16)
    assert len(first["ranked"]) == 5


def test_choices_limit_what_is_tried(capsys):
    words = ["--gpus", "4", "--global-batch", "16", "--micro-batch", "2", "--recompute", "--zero", "2"]
    out = plan(capsys, *RATE, *words, "--pipeline-schedule", "gpipe", "--json")
    (ranking,) = json.loads(out)
    for each in ranking["ranked"]:
        assert (each["micro_batch"], each["recompute"], each["schedule"] in ("1f1b", "gpipe")) == (2, True, True)
        assert each["zero"] == 2 or "shard" not in each["layout"]
    assert {each["schedule"] for each in ranking["ranked"] if "pipeline" in each["layout"]} == {"gpipe"}


def test_a_convolutional_net_is_planned_over_data_and_shard(capsys):
    main(["--model", "resnet18", "--size", "32", "--classes", "10", "--gpus", "2", *RATE, "--json"])
    (ranking,) = json.loads(capsys.readouterr().out)
    assert {each["layout"] for each in ranking["ranked"]} == {"data=2", "shard=2"}


def test_settings_that_work_with_data_only_refuse_the_other_layouts(capsys):
    words = [*RATE, "--gpus", "2", "--global-batch", "4", "--precision", "fp16", "--json"]
    (ranking,) = json.loads(plan(capsys, *words))
    assert [each["layout"] for each in ranking["ranked"]] == ["data=2"]
    assert all("use bf16" in each["reason"] for each in ranking["refused"])


def test_optimizers_with_rates_of_layers_are_planned_over_every_axis(capsys):
    words = [*RATE, "--gpus", "2", "--global-batch", "4", "--optimizer", "lamb", "--zero", "1", "--json"]
    (ranking,) = json.loads(plan(capsys, *words))
    assert {each["layout"] for each in ranking["ranked"]} == {f"{axis}=2" for axis in AXES if axis != "replica"}


def test_gloo_hides_no_collectives(capsys):
    words = [*RATE, "--gpus", "2", "--global-batch", "4", "--json"]

    def find_shard_s(*more):
        (ranking,) = json.loads(plan(capsys, *words, "--zero", "3", *more))
        return next(each["step"]["shard_s"] for each in ranking["ranked"] if each["layout"] == "shard=2")

    assert find_shard_s("--backend", "gloo") > find_shard_s("--overlap", "0") >= find_shard_s()


def test_the_memory_of_a_device_is_a_limit(capsys):
    out = plan(capsys, *RATE, "--device-memory", "100kB")
    assert "and a device has 100.00 kB" in out
    assert "no layout fits" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give either --flops, the rate of a device, such as 150TFLOP/s, or --measured"),
        ([*RATE, "--measured", "x"], "give either --flops"),
        (["--flops", "fast"], "'fast' is not a rate of computation; write it as 150TFLOP/s"),
        ([*RATE, "--device-memory", "much"], "'much' is not a valid size"),
        ([*RATE, "--memory-bandwidth", "much"], "'much' is not a bandwidth"),
        ([*RATE, "--overlap", "2"], r"overlap is 2\.0; expected a number from 0"),
        ([*RATE, "--processors-per-rank", "0"], r"processors_per_rank is 0\.0; expected more than 0"),
        ([*RATE, "--layout", "shard=2"], "leave out --layout"),
        ([*RATE, "--offload-activations"], "plan does not estimate --offload-activations; leave it out"),
        ([*RATE, "--top", "0"], "top is 0; expected at least 1"),
        ([*RATE, "--nodes", "0"], "0 nodes of 1 ranks"),
        ([*RATE, "--profile", "x.json"], "use --measured FILE"),
        (["--measured", "x", "--memory-bandwidth", "2TB/s"], "--memory-bandwidth has no effect with --measured"),
        (["--measured", "missing.json"], "missing.json is no profile"),
        ([*RATE, "--optimizer", "best"], "optimizer is 'best'"),
    ],
)
def test_bad_options_are_refused_with_what_to_do(words, says):
    with pytest.raises(ConfigError, match=says):
        main([*GPT, *words])


@pytest.mark.parametrize(("text", "rate"), [("150TFLOP/s", 150e12), ("40 GFLOPS", 40e9), ("1.5pflop/s", 1.5e15)])
def test_rates_are_read_with_their_unit(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "10", "0TFLOP/s", "-1TFLOP/s", "10TB/s"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ConfigError, match="not a rate of computation"):
        parse_rate(text)


def test_the_command_plans_and_shows_its_settings(capsys):
    done = run("plan", "layouts", *GPT, *RATE, "--gpus", "2", "--global-batch", "4")
    assert "best: --layout" in done.stdout
    assert "usage: datasvc plan layouts" in run("plan", "layouts", "--help").stdout
    main([*GPT, "--show-config"])
    assert "vocabulary" in capsys.readouterr().out


@pytest.mark.slow
def test_bad_options_are_refused_before_torch_is_imported():
    code = (
        "import sys\n"
        "from datasvc.trainer.recipes.planning.command import main\n"
        "try:\n"
        "    main(['--flops', 'fast'])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["ConfigError", "False"]


CONFIG = TrainConfig(data="d@1", repo="r", name="n", vocabulary=64, model_option=("layers=2",), micro_batch=2)


def write(path, *, config=CONFIG, **changes):
    costs = dataclasses.replace(EXAMPLE, samples=6)
    effective = dataclasses.replace(config, model=config.model_or_default)
    profile = {"costs": dataclasses.asdict(costs), "config": effective.to_dict(), "message_s": 0.25} | changes
    path.write_text(json.dumps(profile))
    return str(path)


def test_times_are_those_of_one_sample(tmp_path):
    path = write(tmp_path / "profile.json")
    assert read_measured(path, CONFIG) == MeasuredStep(ComputeTimes(3.0 / 6, 6.0 / 6, 1.0), 2, 0.25)


def test_without_micro_batches_the_passes_are_those_of_the_batch(tmp_path):
    path = write(tmp_path / "profile.json", config=dataclasses.replace(CONFIG, micro_batch=None))
    assert read_measured(path, CONFIG).micro_batch == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "gpt2"}, "measured with model 'gpt', and the plan has 'gpt2'; give --model as it was measured"),
        ({"model_option": ("layers=3",)}, r"model_option \['layers=2'\].* give --model-option"),
        ({"precision": "bf16"}, "measured with precision 'fp32', and the plan has 'bf16'"),
        ({"vocabulary": 65}, "measured with vocabulary 64, and the plan has 65"),
    ],
)
def test_a_profile_of_another_training_is_refused(tmp_path, change, says):
    path = write(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=says):
        read_measured(path, dataclasses.replace(CONFIG, **change))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {}, "config": {}, "message_s": 1}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is no profile: .* profile --json"):
        read_measured(str(path), CONFIG)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no profile"):
        read_measured(str(tmp_path / "missing"), CONFIG)


def test_token_data_have_a_gpt_and_images_a_small_network():
    assert CONFIG.model_or_default == "gpt"
    assert dataclasses.replace(CONFIG, vocabulary=None).model_or_default == "small-cnn"
    assert dataclasses.replace(CONFIG, model="vgg16").model_or_default == "vgg16"


def test_the_options_of_a_training_are_taken_as_they_are_given_to_it(capsys):
    main(["--data", "a@1:0.5", "b@1:0.5", "--repo=r", "--show-config"])
    shown = capsys.readouterr().out
    assert "a@1:0.5 b@1:0.5" in shown
    assert "plan" in shown  # the name, which a plan does not read

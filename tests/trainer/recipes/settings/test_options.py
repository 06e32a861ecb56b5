import dataclasses
import shlex
import subprocess
import sys
from fractions import Fraction
from typing import get_args

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import Evaluation
from datasvc.loaders.decode.backend import Decode, OnBad
from datasvc.loaders.decode.reduced import DecodeScale
from datasvc.models.saving.queue import OVERLAPS
from datasvc.models.tensors.write import CODECS
from datasvc.trainer.__main__ import main
from datasvc.trainer.recipes.settings.config import BatchPlan, TrainConfig, plan_batches
from datasvc.trainer.recipes.settings.groups.images import DecodeSettings, ImageSettings
from datasvc.trainer.recipes.settings.groups.job import CheckpointSettings
from datasvc.trainer.recipes.settings.groups.setting_group import field_types
from datasvc.trainer.recipes.settings.options import parse_options
from datasvc.trainer.recipes.settings.presets import PRESETS
from datasvc.trainer.recipes.start import build_schedule

REQUIRED = {"data": "d@1", "repo": "r", "name": "m"}
ENVIRON = {"DATASVC_REPO": "/r", "DATASVC_CACHE": "/c", "DATASVC_PEERS": "http://a:1"}
WORDS = ["--data", "d@1", "--repo", "r", "--name", "m"]


def with_required(*words):
    """Return the words with the required options in front, without `--data` if they have it: it is given once."""
    return [*(WORDS[2:] if "--data" in words else WORDS), *words]


def config_of(*words):
    return parse_options(with_required(*words)).config()


@pytest.fixture
def program(monkeypatch, capsys):
    """Runs the training program in this process; returns its exit status and what it printed."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["trainer", *words])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


def test_every_setting_is_an_option_with_a_help(program):
    assert config_of() == TrainConfig(**REQUIRED)
    # fmt: off
    config = config_of(
        "--scale", "0.5", "0.9", "--size", "64", "--resize", "72", "--warmup-epochs", "0.5",
        "--cache", "/c", "--nesterov", "--milestones", "1:0.1", "2:0.01", "--betas", "0.8", "0.9", "--clip-norm", "1",
        "--model-option", "a=1", 'b="x"',
    )
    # fmt: on
    assert (config.scale, config.resize, config.warmup_epochs, config.nesterov) == ((0.5, 0.9), 72, 0.5, True)
    assert config.parse_milestones() == ((1.0, 0.1), (2.0, 0.01))
    assert (config.betas, config.clip_norm, config.cache) == ((0.8, 0.9), 1.0, "/c")
    assert config.parse_model_options() == {"a": 1, "b": "x"}
    status, helps, _ = program("--help")
    assert status == 0
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in helps
    assert "powersgd:RANK[:STEPS]" in helps
    assert "optimizer steps: the run may end before --epochs are over. The schedule" in " ".join(helps.split())


@pytest.mark.parametrize(
    "change",
    [
        {"evaluation": "exact"},
        {"epochs": 0},
        {"learning_rate": float("nan")},
        {"momentum": -1.0},
        {"scale": (2.0, 3.0)},
        {"warmup_epochs": -1},
        {"resume": "maybe"},
        {"resume": "m@1", "init_from": "n@1"},
        {"init_from": "Bad/Name"},
        {"init_exclude": ("head",)},
        {"name": "Bad/Name"},
        {"device": "tpu"},
        {"profile": "/nowhere/at/all/trace.json"},
        {"optimizer": "adagrad"},
        {"precision": "fp8"},
        {"label_smoothing": 1.0},
        {"ema_decay": 1.0},
        {"betas": (0.9, 1.0)},
        {"milestones": ("30",)},
        {"model_option": ("dropout",)},
        {"patience": 3},
        {"patience": 3, "evaluate_every": 1, "stop_metric": "reward"},
        {"patience": 3, "evaluate_every": 1, "stop_mode": "low"},
        {"nesterov": True, "optimizer": "lamb"},
        {"peers": "ranks"},
        {"log_to": ("tensorboard",)},
        {"log_to": ("paper:here",)},
        {"log_to": ("wandb:p", "wandb:q")},
        {"micro_batch": 0},
        {"rate_scaling": "cubic"},
        {"global_batch": 0},
        {"reference_batch": 0},
        {"schedule": "line"},
        {"lanes": 0},
        {"block": 0},
        {"cache": "/c", "cache_budget": "junk"},
        {"cache_budget": "50GB"},
        {"stop_mode": "sideways"},
        {"milestones": ("nan:0.1",)},
        {"milestones": ("1:-0.1",)},
        {"milestones": ("2:0.1", "1:0.01")},
        {"schedule": "step"},
        {"seed": -1},
        {"seed": 1 << 64},
        {"resize": 8, "size": 16},
        {"shuffle": "windowed", "lanes": 4},
        {"lanes": 4, "block": 16},
        {"resume": "small@"},
        {"data": "digits@"},
        {"commit_every": 0},
    ],
)
def test_settings_out_of_range_are_refused_before_anything_runs(change):
    with pytest.raises(ConfigError):
        TrainConfig(**{**REQUIRED, **change})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--resize", "8", "--size", "16"), "resize is 8, below size 16.*--resize or a smaller --size"),
        (("--resume", "small@"), "resume is 'small@': '' is not a valid name of a tag"),
        (("--data", "digits@"), "data is 'digits@': '' is not a valid name of a tag"),
        (("--init-from", "small@"), "init_from is 'small@': '' is not a valid name of a tag"),
        (("--cache", "/c", "--cache-budget", "junk"), "cache_budget is 'junk': .* write for example 50GB"),
        (("--cache-budget", "50GB"), "cache_budget is the budget .*--cache"),
        (
            ("--elastic", "--layout", "replica=3,data=2", "--sync", "local:4"),
            ".*give it the axis shard in place of.*",
        ),
        (("--elastic", "--op", "adasum"), "op is 'adasum', which needs a power of two ranks.*--op average"),
        (("--shuffle", "windowed", "--lanes", "4"), "lanes is 4, and block is not set; give --block too"),
        (("--statistics-batches", "3"), "statistics_batches is 3, and .*--statistics recompute, or leave it at 10"),
        (("--decode-lag", "3"), "decode_lag is 3, and .*--decode-group, or leave it at 6"),
        (("--commit-every", "3"), "commit_every is 3, and .*--elastic, or leave it at 10"),
        (("--data", "a@1:1e400", "b@1:1"), "data has 'a@1:1e400'; .*, with a finite weight of 0 or more"),
        (("--data", f"a@1:{10**400}/3", "b@1:1"), "data has .*, with a finite weight of 0 or more"),
        (("--bucket", "much"), "bucket is 'much': .*"),
        (("--bucket", "auto", "--op", "adasum"), "op is 'adasum', which sends no buckets; leave out --bucket"),
        (("--bucket", "auto", "--compression", "topk:0.1"), "bucket is 'auto'; give --bucket a size"),
    ],
)
def test_a_refused_setting_is_named_with_what_to_change(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_options(with_required(*words), environ={}).config()


def test_the_size_of_buckets_is_a_size_or_chosen_from_the_first_steps():
    for words, expected in (((), None), (("--bucket", "4MiB"), 4 << 20), (("--bucket", "auto"), "auto")):
        assert parse_options([*WORDS, *words], environ={}).config().parse_bucket() == expected


def test_flags_override_a_preset_which_overrides_defaults_and_each_value_says_so():
    options = parse_options([*WORDS, "--preset", "goyal2017", "--epochs", "3"])
    settings, config = options.settings, options.config()
    assert (config.epochs, settings["epochs"].source) == (3, "command line")
    assert (config.global_batch, config.nesterov, config.model) == (8192, True, "resnet50")
    assert settings["learning_rate"].source == "preset goyal2017: section 5.1: 0.1 kn / 256"
    assert settings["seed"].source == "default"
    assert config_of("--preset", "goyal2017", "--batch-size", "16").global_batch is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_configuration_and_cites_its_paper(name):
    config = config_of("--preset", name)
    said = parse_options(["--preset", name, "--show-config"]).describe()
    assert "arXiv:" in said.splitlines()[0]
    batches = plan_batches(config, world_size=64)
    assert batches.global_batch == config.global_batch
    schedule = build_schedule(config, batches.global_batch)
    assert schedule.rate_at(config.epochs) <= schedule.rate_at(config.epochs / 2) <= schedule.peak


def test_the_presets_of_other_models_have_the_papers_settings():
    vgg, gpt2, inception = (
        config_of("--preset", name) for name in ("nichols2021-vgg16", "nichols2021-gpt2", "szegedy2016")
    )
    assert (vgg.model, vgg.global_batch, vgg.optimizer, vgg.learning_rate) == ("vgg16", 64, "sgd", 0.01)
    assert (gpt2.model, gpt2.optimizer, gpt2.learning_rate, gpt2.vocabulary) == ("gpt2-medium", "lamb", 1e-3, 50257)
    assert (inception.model, inception.size, inception.label_smoothing) == ("inception-v3", 299, 0.1)
    schedule = build_schedule(inception, 1600)
    assert [schedule.rate_at(at) for at in (0.5, 2, 99)] == pytest.approx([0.045, 0.045 * 0.94, 0.045 * 0.94**49])


def test_goyal_s_preset_has_the_paper_s_rates():
    config = config_of("--preset", "goyal2017")
    schedule = build_schedule(config, plan_batches(config, 256).global_batch)
    found = [schedule.rate_at(at) for at in (0, 2.5, 5, 29.9, 30, 60, 80)]
    assert found == pytest.approx([0.1, 1.65, 3.2, 3.2, 0.32, 0.032, 0.0032])


def test_a_preset_s_number_of_batches_goes_with_the_statistics_that_it_is_for():
    preset = ("--preset", "akiba2017")
    config = config_of(*preset, "--statistics", "average")
    assert (config.statistics, config.statistics_batches) == ("average", 10)
    assert config_of(*preset, "--statistics", "recompute").statistics_batches == 1
    with pytest.raises(ConfigError, match="statistics_batches is 3, and statistics is 'average'"):
        config_of(*preset, "--statistics", "average", "--statistics-batches", "3")


def test_akiba_s_preset_starts_slowly():
    config = config_of("--preset", "akiba2017")
    schedule = build_schedule(config, 32768)
    base = 0.1 * 32768 / 256
    found = [schedule.rate_at(at) / base for at in (1, 39.9, 40, 70, 85)]
    assert found == pytest.approx([0.5, 0.5, 0.075, 0.01, 0.001])


def test_show_config_prints_every_setting_with_its_source_and_runs_nothing(program):
    status, shown, _ = program("--preset", "jia2018", "--show-config", "--precision", "bf16")
    assert status == 0
    lines = {line.split()[0]: line for line in shown.splitlines() if line and not line.startswith("#")}
    assert lines.keys() == {field.name for field in dataclasses.fields(TrainConfig)}
    assert lines["precision"].split() == ["precision", "bf16", "command", "line"]
    assert lines["data"].split() == ["data", "?", "required"]


def test_variables_stand_for_options_that_are_not_given():
    options = parse_options(["--data", "d", "--name", "m"], environ=ENVIRON)
    config = options.config()
    assert (config.repo, config.cache, config.peers) == ("/r", "/c", "http://a:1")
    assert options.settings["repo"].source == "variable DATASVC_REPO"
    flags = ["--cache", "/other", "--peers", "ranks"]
    config = parse_options([*WORDS, *flags], environ=ENVIRON).config()
    assert (config.repo, config.cache, config.peers) == ("r", "/other", "ranks")
    # An empty variable is one that is not set.
    assert parse_options(WORDS, environ={"DATASVC_CACHE": ""}).config().cache is None


def test_an_empty_option_turns_cache_and_peers_of_the_environment_off():
    options = parse_options([*WORDS, "--cache", ""], environ=ENVIRON)
    assert (options.config().cache, options.config().peers) == (None, None)
    assert options.settings["cache"].source == "command line"
    assert parse_options([*WORDS, "--peers", ""], environ=ENVIRON).config().peers is None
    assert parse_options([*WORDS, "--cache", "", "--peers", ""], environ=ENVIRON).config().peers is None


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("peers: ranks", "--peers ''"), ("cache_budget: 5GB", "--cache-budget ''"), ("tenant: b", "--tenant default")],
)
def test_without_the_cache_of_a_file_its_other_settings_are_refused_with_the_option_for_it(tmp_path, setting, remedy):
    (tmp_path / "run.yaml").write_text(f"cache: /c\n{setting}\n")
    words = [*WORDS, "--config", str(tmp_path / "run.yaml"), "--cache", ""]
    with pytest.raises(ConfigError, match=f"or give {remedy}"):
        parse_options(words, environ={}).config()
    assert parse_options([*words, *shlex.split(remedy)], environ={}).config().cache is None


def test_peers_of_the_environment_are_no_error_without_a_cache():
    assert parse_options(WORDS, environ={"DATASVC_PEERS": "http://a:1"}).config().peers is None
    with pytest.raises(ConfigError, match="peers need a node cache"):
        parse_options([*WORDS, "--peers", "ranks"], environ={}).config()


def test_the_choices_of_the_checkpoint_options_are_those_of_the_manager():
    types = field_types(CheckpointSettings)
    assert (types["checkpoint_overlap"].choices, types["codec"].choices) == (OVERLAPS, CODECS)
    assert field_types(ImageSettings)["evaluation"].choices == get_args(Evaluation)


def test_a_loader_beside_the_training_has_no_group_and_no_ledger():
    config = config_of("--decode-group", "pair", "--decode-lag", "9", "--ledger", "/ledger")
    assert config.without_records() == config_of()


def test_the_choices_of_decoding_are_those_of_the_loader():
    types = field_types(DecodeSettings)
    assert (types["decode"].choices, types["on_bad"].choices) == (get_args(Decode), get_args(OnBad))
    assert types["decode_scale"].choices == get_args(DecodeScale)


def test_the_parts_of_a_mixture_are_words_of_one_option(tmp_path):
    words = ["--repo", "r", "--name", "m", "--data", "a@1:0.8", "b@2:0.2"]
    assert parse_options(words).config().data == "a@1:0.8 b@2:0.2"
    (tmp_path / "run.yaml").write_text("data: ['a@1:0.8', 'b@2:0.2']\n")
    assert parse_options([*words[:4], "--config", str(tmp_path / "run.yaml")]).config().data == "a@1:0.8 b@2:0.2"
    assert config_of("--data", "a@best:val_loss:0.5", "b:1/2").parse_data() == (
        ("a@best:val_loss", Fraction(1, 2)),
        ("b", Fraction(1, 2)),
    )
    assert config_of("--data", "a@best:val_loss").parse_data() == (("a@best:val_loss", Fraction(1)),)


def test_stages_name_the_data_sets_of_a_mixture():
    data = ["--data", "web@1:0.7", "books@best:val_loss:0.3", "pets@3[label != 'cat']:0"]
    stages = "1_000: web:1 books@best:val_loss:1/2; ramp to 2000: pets:3;"
    assert config_of(*data, "--stages", stages).parse_stages() == [
        (1000, (Fraction(1), Fraction(1, 2), Fraction(0)), False),
        (2000, (Fraction(0), Fraction(0), Fraction(3)), True),
    ]
    assert config_of(*data).parse_stages() == []
    for wrong, message in {
        "web:1": "stages has 'web:1'; expected stages as SAMPLES: NAME:WEIGHT",
        "1e3: web:1": "expected stages as SAMPLES",
        "10: web": "stages has 'web'; expected each data set of a mixture as REFERENCE:WEIGHT",
        "10: web:-1": "stages has 'web:-1'",
        "10: cats:1": r"'cats' in '10: cats:1'; expected one of the data sets web@1, books@best:val_loss, pets@3\[.*",
        "10: web:1 web@1:1": "'web@1' in '10: web:1 web@1:1'; expected one of",
    }.items():
        with pytest.raises(ConfigError, match=message):
            config_of(*data, "--stages", wrong)
    with pytest.raises(ConfigError, match="mixture_block, epoch_samples and stages are settings of a mixture"):
        config_of("--data", "web@1", "--stages", "10: web:1")


MISTAKES = [
    [],
    [*WORDS, "--epochs", "many"],
    [*WORDS, "--epoch\ns", "1"],
    [*WORDS, "--epochs", "0"],
    [*WORDS, "--codec", "zip"],
    [*WORDS, "--grace", "soon"],
    [*WORDS, "--patience", "1", "--evaluate-every", "1", "--stop-metric", "reward"],
    [*WORDS, "--log-to", "paper:here"],
    [*WORDS, "--seed", "-1"],
    [*WORDS, "--compression", "topk:2"],
    [*WORDS, "--compression", "topk:0.01", "--op", "adasum"],
    [*WORDS, "--compression", "powersgd:2", "--precision", "fp16"],
    [*WORDS, "--statistics-batches", "0"],
    [*WORDS, "--cache", "/c", "--cache-budget", "junk"],
    [*WORDS, "--config", "nowhere.yaml"],
    ["profile", *WORDS[:4], "--steps", "few"],
    ["profile", *WORDS[:4], "--steps", "0"],
    ["profile", *WORDS[:4], "--bandwidth", "wide"],
]
TELL = """
import contextlib, io, sys
from datasvc.trainer.__main__ import main

for words in {mistakes!r}:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main(words)
        except SystemExit as end:
            assert end.code == 2, (words, end.code)
        else:
            raise AssertionError(words)
    lines = said.getvalue().splitlines()
    assert len(lines) == 1 and "error: " in lines[0], (words, lines)
    assert "torch" not in sys.modules, words
"""


@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_one_line_before_torch_is_imported():
    code = TELL.format(mistakes=MISTAKES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_missing_or_unknown_ends_with_a_message_of_one_line(program, monkeypatch):
    monkeypatch.delenv("DATASVC_REPO", raising=False)
    status, _, said = program("--data", "d")
    assert status == 2
    assert said == (
        "python -m datasvc.trainer: error: the following arguments are required: --repo, --name; "
        "DATASVC_REPO may stand for --repo (see python -m datasvc.trainer --help)\n"
    )
    with pytest.raises(ConfigError, match="goyal2017"):
        parse_options(["--preset", "nobody1999"])


def test_the_global_batch_is_dealt_to_ranks_and_passes():
    config = TrainConfig(**REQUIRED, global_batch=96, micro_batch=20)
    assert plan_batches(config, 2) == BatchPlan(global_batch=96, batch_size=48, num_passes=3, micro_batch=20)
    assert plan_batches(config, 8) == BatchPlan(global_batch=96, batch_size=12, num_passes=1, micro_batch=12)
    assert plan_batches(TrainConfig(**REQUIRED, batch_size=32), 3) == BatchPlan(96, 32, 1, 32)
    for world_size in (5, 97):
        with pytest.raises(ConfigError, match="evenly"):
            plan_batches(config, world_size)

"""Presets: published recipes with the source of each value.

Four are for ResNet-50 with large batches on ImageNet-1k; the others are the workloads of comparisons of systems.

A flag on the command line overrides the value of a preset. Batch sizes are global, so a run is the same at every
world size that divides the batch, except for batch normalisation: its statistics are those of one micro-batch of one
rank, unless --sync-batch-norm is given.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.trainer.launch.config_file import parse_file
from datasvc.trainer.recipes.settings.config import setting_types
from datasvc.trainer.recipes.settings.groups.setting_group import FieldType, naming

PRESET = "preset"
"""The only entry of a file that is no setting: the name of a preset."""


@dataclass(frozen=True)
class Choice:
    """One setting of a preset.

    Attributes:
        value: value of the field of `TrainConfig`.
        source: section of the paper; if the paper gives no value, where the value used here comes from.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class Preset:
    """A published recipe.

    Attributes:
        citation: authors, year, title and number of the paper.
        choices: settings by field of `TrainConfig`.
        differs: differences between the paper and this program.
    """

    citation: str
    choices: Mapping[str, Choice]
    differs: str = ""


_INCEPTION_CROPS: Final = {
    "size": Choice(224, "the usual size of ImageNet crops"),
    "scale": Choice((0.08, 1.0), "Szegedy et al. 2015, used by Goyal et al. 2017, section 5.1"),
    "ratio": Choice((3 / 4, 4 / 3), "Szegedy et al. 2015, used by Goyal et al. 2017, section 5.1"),
    "flip": Choice(0.5, "Goyal et al. 2017, section 5.1"),
}
_RESNET50: Final = {
    "model": Choice("resnet50", "the model of the paper"),
    "epochs": Choice(90, "the paper's title result"),
    **_INCEPTION_CROPS,
}
_CHOSEN: Final = "chosen here"
_NICHOLS: Final = (
    "Nichols, Singh, Lin and Bhatele 2021, A Survey and Empirical Evaluation of Parallel Deep Learning Frameworks, "
    "arXiv:2111.04949"
)
_TENSORFLOW_INCEPTION: Final = "TensorFlow's training program of Inception-V3"
_REFERENCE_LARS: Final = "MLPerf's reference for ResNet-50 with LARS at 32,768"

PRESETS: Final[Mapping[str, Preset]] = {
    "goyal2017": Preset(
        "Goyal et al. 2017, Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, arXiv:1706.02677",
        {
            **_RESNET50,
            "model_option": Choice(
                ("zero_init_residual=true",),
                "section 5.1: gamma = 0 in the last batch normalisation of each residual block",
            ),
            "global_batch": Choice(8192, "section 5.1: kn, 256 GPUs with n = 32"),
            "micro_batch": Choice(32, "section 2.3: batch normalisation over n = 32 samples"),
            "optimizer": Choice("sgd", "section 5.1"),
            "learning_rate": Choice(0.1, "section 5.1: 0.1 kn / 256"),
            "rate_scaling": Choice("linear", "section 2.1"),
            "reference_batch": Choice(256, "section 5.1"),
            "momentum": Choice(0.9, "section 5.1"),
            "nesterov": Choice(True, "section 5.1"),
            "weight_decay": Choice(1e-4, "section 5.1"),
            "decayed": Choice("weights", "section 5.1: no weight decay of batch normalisation"),
            "schedule": Choice("step", "section 5.1"),
            "milestones": Choice(("30:0.1", "60:0.01", "80:0.001"), "section 5.1"),
            "warmup_epochs": Choice(5.0, "section 2.2"),
            "warmup_start": Choice(0.1, "section 2.2: from eta to k eta"),
        },
        differs="the bias of the classifier has no weight decay",
    ),
    "you2017": Preset(
        "You, Gitman and Ginsburg 2017, Large Batch Training of Convolutional Networks, arXiv:1708.03888",
        {
            **_RESNET50,
            "global_batch": Choice(32768, "the paper's largest batch for ResNet-50"),
            "micro_batch": Choice(64, _CHOSEN),
            "optimizer": Choice("lars", "the paper"),
            "learning_rate": Choice(31.2, _REFERENCE_LARS),
            "rate_scaling": Choice("none", "the rate is for this batch"),
            "momentum": Choice(0.9, "the paper"),
            "trust_coefficient": Choice(0.001, "the paper"),
            "weight_decay": Choice(1e-4, _REFERENCE_LARS),
            "decayed": Choice("weights", _REFERENCE_LARS),
            "schedule": Choice("polynomial", "the paper"),
            "power": Choice(2.0, "the paper: poly, power 2"),
            "warmup_epochs": Choice(25.0, _REFERENCE_LARS),
            "warmup_start": Choice(0.0, _REFERENCE_LARS),
        },
        differs="rate, warm-up and weight decay are those of MLPerf's later reference implementation",
    ),
    "akiba2017": Preset(
        "Akiba, Suzuki and Fukuda 2017, Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet in 15 Minutes, "
        "arXiv:1711.04325",
        {
            **_RESNET50,
            "global_batch": Choice(32768, "abstract: 1,024 GPUs with 32 samples"),
            "micro_batch": Choice(32, "abstract: 32 samples per GPU"),
            "optimizer": Choice("rmsprop-sgd", "the paper: RMSprop warm-up, centre 10, period 5 epochs"),
            "rmsprop_rate": Choice(3e-4, "the paper"),
            "momentum": Choice(0.9, "the paper"),
            "learning_rate": Choice(0.05, "the paper: slow start, half of Goyal et al.'s 0.1"),
            "rate_scaling": Choice("linear", "the paper"),
            "reference_batch": Choice(256, "the paper"),
            "weight_decay": Choice(1e-4, "as Goyal et al. 2017"),
            "schedule": Choice("step", "the paper"),
            "milestones": Choice(
                ("40:0.15", "70:0.02", "85:0.002"), "the paper: 0.5, 0.075, 0.01 and 0.001 of 0.1 kn / 256"
            ),
            "warmup_epochs": Choice(0.0, "the paper: RMSprop replaces the gradual warm-up"),
            "statistics": Choice("recompute", "the paper: batch normalisation without moving averages"),
            "statistics_batches": Choice(1, "the paper: statistics of one minibatch of all workers"),
        },
        differs="the statistics of batch normalisation are computed over the next minibatch with the final weights, "
        "not over the last one of the training; gradients are reduced in float32; the transition to SGD is linear "
        "after its middle",
    ),
    "jia2018": Preset(
        "Jia et al. 2018, Highly Scalable Deep Learning Training System with Mixed-Precision: Training ImageNet in "
        "Four Minutes, arXiv:1807.11205",
        {
            **_RESNET50,
            "global_batch": Choice(65536, "abstract: 64k"),
            "micro_batch": Choice(32, "the paper's result: 2,048 GPUs"),
            "precision": Choice("fp16", "the paper: half precision, with weights and updates in single precision"),
            "compression": Choice("fp16", "the paper: gradients are reduced in half precision"),
            "optimizer": Choice("lars", "the paper"),
            "decayed": Choice("weights", "the paper: no weight decay of biases and batch normalisation"),
            "label_smoothing": Choice(0.1, "the value of Szegedy et al. 2016"),
            "learning_rate": Choice(31.2, _REFERENCE_LARS),
            "rate_scaling": Choice("sqrt", "chosen here: from 32,768 to this batch"),
            "reference_batch": Choice(32768, _REFERENCE_LARS),
            "momentum": Choice(0.9, "as You et al. 2017"),
            "trust_coefficient": Choice(0.001, "as You et al. 2017"),
            "weight_decay": Choice(5e-5, _CHOSEN),
            "schedule": Choice("polynomial", "as You et al. 2017"),
            "power": Choice(2.0, "as You et al. 2017"),
            "warmup_epochs": Choice(25.0, _REFERENCE_LARS),
            "channels_last": Choice(True, "faster on tensor cores; results are the same"),
        },
        differs="learning rates are ours, because the paper gives none",
    ),
    "szegedy2016": Preset(
        "Szegedy et al. 2016, Rethinking the Inception Architecture for Computer Vision, arXiv:1512.00567",
        {
            "model": Choice("inception-v3", "the model of the paper"),
            "epochs": Choice(100, "section 8"),
            "global_batch": Choice(1600, "section 8: 50 replicas with 32 samples"),
            "micro_batch": Choice(32, "section 8: batch size 32"),
            "optimizer": Choice("sgd", "section 8: earlier experiments used momentum"),
            "momentum": Choice(0.9, "section 8"),
            "learning_rate": Choice(0.045, "section 8"),
            "rate_scaling": Choice("none", "the rate is for this batch"),
            "schedule": Choice("step", "section 8"),
            "milestones": Choice(
                tuple(f"{epoch}:{0.94 ** (epoch // 2):.6g}" for epoch in range(2, 100, 2)),
                "section 8: a factor of 0.94 every two epochs",
            ),
            "warmup_epochs": Choice(0.0, "section 8 has none"),
            "weight_decay": Choice(4e-5, _TENSORFLOW_INCEPTION),
            "clip_norm": Choice(2.0, "section 8: gradient clipping with threshold 2.0"),
            "label_smoothing": Choice(0.1, "section 7"),
            "ema_decay": Choice(
                0.9999, f"section 8: a running average is evaluated; its decay: {_TENSORFLOW_INCEPTION}"
            ),
            **_INCEPTION_CROPS,
            "size": Choice(299, "section 6 and table 1: 299 x 299"),
        },
        differs="all replicas make one step together, with momentum, where the paper's best models used RMSprop with "
        "epsilon 1; initial weights are those of He et al. 2015; the sizes of crops are those of Szegedy et al. 2015",
    ),
    "nichols2021-vgg16": Preset(
        _NICHOLS,
        {
            "model": Choice("vgg16", "the survey: VGG-16 on ImageNet"),
            "global_batch": Choice(64, "the survey"),
            "optimizer": Choice("sgd", "the survey"),
            "learning_rate": Choice(0.01, "the survey"),
            "rate_scaling": Choice("none", "the rate is for this batch"),
            "momentum": Choice(0.9, "Simonyan and Zisserman 2015, section 3.1"),
            "weight_decay": Choice(5e-4, "Simonyan and Zisserman 2015, section 3.1"),
            "schedule": Choice("constant", "chosen here: the survey has one rate"),
            "warmup_epochs": Choice(0.0, _CHOSEN),
            "epochs": Choice(74, "Simonyan and Zisserman 2015, section 3.1"),
            **_INCEPTION_CROPS,
        },
        differs="crops are those of Szegedy et al. 2015; the survey compares the speed of frameworks, and "
        "does not give the values that have another source here",
    ),
    "nichols2021-gpt2": Preset(
        _NICHOLS,
        {
            "model": Choice("gpt2-medium", "the survey: GPT-2-medium"),
            "model_option": Choice(("context=1024",), "Radford et al. 2019: blocks of 1,024 tokens"),
            "vocabulary": Choice(50257, "Radford et al. 2019"),
            "global_batch": Choice(64, _CHOSEN),
            "micro_batch": Choice(1, "chosen here: it fits the most devices"),
            "optimizer": Choice("lamb", "the survey"),
            "learning_rate": Choice(1e-3, "the survey"),
            "rate_scaling": Choice("none", "the rate is for this batch"),
            "betas": Choice((0.9, 0.999), "You et al. 2019, arXiv:1904.00962"),
            "weight_decay": Choice(0.01, "You et al. 2019, arXiv:1904.00962"),
            "schedule": Choice("constant", "chosen here: the survey has one rate"),
            "warmup_epochs": Choice(0.0, _CHOSEN),
            "epochs": Choice(1, _CHOSEN),
        },
        differs="trains on any token blocks of the vocabulary of GPT-2; the survey does not give what is chosen here",
    ),
}


def find_preset(name: str) -> Preset:
    """Return the preset `name`. Raises ConfigError: there is no such preset."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def read_settings(path: str) -> dict[str, Any]:
    """Return the settings of a file by field name, and with the key `PRESET` the name of a preset if it has one.

    The file is YAML, or JSON or TOML if its name ends with .json or .toml. Names may have dashes or underscores. The
    values have the types of their fields; ranges and choices are not checked.

    Raises:
        ConfigError: the file cannot be read; it has an unknown name, or a value of another type.
    """
    try:
        content = parse_file(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has a {type(content).__name__}; expected settings, each as 'name: value'")
    types_by_name = {**setting_types(), PRESET: FieldType(str)}
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in types_by_name:
            near = difflib.get_close_matches(name, types_by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "--help lists the settings; names have underscores here"
            raise ConfigError(f"{path} has a setting {key!r}, which does not exist; {hint}")
        if name in settings:
            raise ConfigError(f"{path} has the setting {name!r} twice; remove one of them")
        with naming(name, value):
            settings[name] = _convert(value, types_by_name[name], path)
    return settings


def format_yaml(name: str, value: Any, comment: str) -> str:
    """Return a line of a YAML file that `read_settings` reads back as the same value."""
    # A JSON value is a YAML value, so writing needs no PyYAML.
    return f"{name}: {json.dumps(value, ensure_ascii=False)}  # {comment}"


def _convert(value: Any, field_type: FieldType, path: str) -> Any:
    """Return a value of a file as the type of its field. Raises ConfigError: it has another type."""
    if value is None and field_type.is_optional:
        return None
    if field_type.is_words and isinstance(value, list):
        return " ".join(_convert_member(word, str, path) for word in value)
    if not field_type.is_tuple:
        return _convert_member(value, field_type.kind, path)
    # A single value stands for a list of one, as on the command line.
    members = value if isinstance(value, list) else [value]
    if field_type.length is not None and len(members) != field_type.length:
        raise ConfigError(f"expected a list of {field_type.length} values in {path}")
    return tuple(_convert_member(member, field_type.kind, path) for member in members)


def _convert_member(value: Any, kind: type, path: str) -> Any:
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1, which PyYAML reads, has 1e-4 as a string
        except ValueError:
            pass
    # A bool is an int in Python, so compare the classes.
    if type(value) is kind:
        return value
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
    hint = "; put it into quotes" if kind is str and not isinstance(value, list | dict | None) else ""
    raise ConfigError(f"expected {expected} in {path}{hint}")

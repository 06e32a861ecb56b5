import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.build import build_compression
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.groups.training import parse_compression

REQUIRED = {"data": "d@1", "repo": "r", "name": "m"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("none", {}),
        ("fp16", {}),
        ("bf16", {}),
        ("topk:0.01", {"ratio": 0.01}),
        ("topk:1", {"ratio": 1.0}),
        ("topk:0.01:500", {"ratio": 0.01, "warmup_steps": 500}),
        ("dgc:0.001", {"ratio": 0.001}),
        ("dgc:0.001:0", {"ratio": 0.001, "warmup_steps": 0}),
        ("quantized:int4", {"codec": "int4"}),
        ("quantized:qsgd", {"codec": "qsgd", "levels": 7}),
        ("quantized:qsgd:15", {"codec": "qsgd", "levels": 15}),
        ("powersgd:2", {"rank": 2, "start_iteration": 0}),
        ("powersgd:4:1000", {"rank": 4, "start_iteration": 1000}),
    ],
)
def test_a_compression_is_its_name_and_its_numbers(text, arguments):
    choice = parse_compression(text)
    assert (choice.name, choice.arguments) == (text.partition(":")[0], arguments)
    assert choice.has_memory == bool(arguments)
    compression = build_compression(TrainConfig(**REQUIRED, compression=text))
    for name, value in arguments.items():
        assert getattr(compression, name) == value


@pytest.mark.parametrize(
    "text",
    [
        "zip",
        "topk",
        "topk:",
        "topk:0",
        "topk:2",
        "topk:-0.1",
        "topk:nan",
        "topk:some",
        "topk:0.1:2:3",
        "topk:0.1:",
        "dgc:0.1:-1",
        "dgc",
        "quantized",
        "quantized:int9",
        "quantized:int4:7",
        "quantized:qsgd:0",
        "quantized:qsgd:128",
        "quantized:qsgd:7:7",
        "fp16:2",
        "none:",
        "powersgd",
        "powersgd:",
        "powersgd:0",
        "powersgd:1.5",
        "powersgd:2:-1",
        "powersgd:2:3:4",
        "powersgd:2:",
    ],
)
def test_another_form_is_refused_with_those_that_there_are(text):
    with pytest.raises(
        ConfigError, match=f"^compression is '{text}'; expected none, fp16, .*topk:0.01, .*powersgd:2"
    ):
        TrainConfig(**REQUIRED, compression=text)


@pytest.mark.parametrize("text", ["topk:0.01", "powersgd:2", "quantized:int8"])
def test_what_is_sent_later_goes_neither_with_adasum_nor_with_a_loss_scale(text):
    with pytest.raises(ConfigError, match=f"compression is '{text}' and op is 'adasum'.*--op average"):
        TrainConfig(**REQUIRED, compression=text, op="adasum")
    with pytest.raises(ConfigError, match=f"precision is 'fp16' and compression is '{text}'.*--precision bf16"):
        TrainConfig(**REQUIRED, compression=text, precision="fp16")
    assert TrainConfig(**REQUIRED, compression="fp16", op="adasum", precision="fp16").combines_steps


def test_an_empty_text_is_refused():
    with pytest.raises(ConfigError, match="compression is ''"):
        parse_compression("")


def test_dgc_takes_the_momentum_of_sgd_and_of_no_other_optimizer():
    config = TrainConfig(**REQUIRED, compression="dgc:0.01", momentum=0.8)
    assert build_compression(config).momentum == 0.8
    for optimizer in ({"optimizer": "adamw"}, {"optimizer": "lars"}, {"nesterov": True}):
        with pytest.raises(ConfigError, match=r"compression is 'dgc:0.01'.*momentum of SGD.*--compression topk"):
            TrainConfig(**REQUIRED, compression="dgc:0.01", **optimizer)

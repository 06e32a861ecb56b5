"""Models by name: what there is, what it holds, and what is said of one that cannot be built."""

import sys

import pytest
import torch
from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models import MODELS, build_model

GPT2_VOCABULARY = 50_257


def count_parameters(name, num_classes=1000, **options):
    with torch.device("meta"):
        model = build_model(name, num_classes, **options)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("alexnet", 61_100_840),
        ("googlenet", 13_004_888),
        ("inception-v3", 27_161_264),
        ("vgg16", 138_357_544),
    ],
)
def test_a_model_has_as_many_parameters_as_are_published(name, published):
    assert count_parameters(name) == published


def test_variants_have_as_many_parameters_as_are_published():
    assert count_parameters("vgg16", batch_norm=True) == 138_365_992
    assert count_parameters("googlenet", auxiliary=False) == 6_624_904
    assert count_parameters("inception-v3", auxiliary=False) == 23_834_568
    # The paper's own network has a bias for each of its 7,280 filters, where ours has a gamma and a beta.
    assert count_parameters("googlenet", auxiliary=False, kernel=5) == 6_998_552 + 7_280
    assert count_parameters("gpt2", GPT2_VOCABULARY) == 124_439_808
    assert count_parameters("gpt2-medium", GPT2_VOCABULARY) == 354_823_168


def test_a_resnet50_has_the_161_tensors_that_a_step_reduces():
    with torch.device("meta"):
        assert len(list(build_model("resnet50", 1000).parameters())) == 161


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_classes_decide_the_width_of_the_logits(name):
    with torch.device("meta"):
        model = build_model(name, 37).eval()
        if name.startswith("gpt"):
            assert model(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 64, 37)
        else:
            channels = 1 if name == "keyword-cnn" else 3
            assert model(torch.zeros(2, channels, 224, 224)).shape == (2, 37)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "gpt"])
def test_equal_seeds_give_equal_weights_and_other_seeds_others(name):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([parameter.flatten() for parameter in build_model(name, 10).parameters()])

    first = weights(1)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))


def test_an_unknown_model_says_which_there_are():
    with pytest.raises(ConfigError, match=r"alexnet, googlenet, .*inception-v3, .*vgg16.*module:function"):
        build_model("resnet9000", 10)


def test_an_option_that_a_model_lacks_says_which_it_has():
    with pytest.raises(ConfigError, match=r"depth.*its options are: zero_init_residual, small_input"):
        build_model("resnet18", 10, depth=3)
    with pytest.raises(ConfigError, match="its options are: none"):
        build_model("small-cnn", 10, depth=3)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet18", {"small_input": "false"}, "small_input is 'false'; expected bool"),
        ("alexnet", {"dropout": True}, "dropout is True; expected float"),
        ("alexnet", {"dropout": 1.5}, "dropout probability"),
        ("googlenet", {"kernel": 4}, "kernel is 4; expected 3"),
        ("gpt", {"layers": 0}, "layers is 0; expected at least 1"),
        ("gpt", {"width": 100, "heads": 7}, "a width that is a multiple of heads"),
    ],
)
def test_an_options_value_that_does_not_fit_is_refused(name, options, said):
    with torch.device("meta"), pytest.raises(ConfigError, match=said):
        build_model(name, 10, **options)


def test_a_whole_number_is_a_float_too():
    with torch.device("meta"):
        assert build_model("alexnet", 10, dropout=0)


def test_a_model_of_no_classes_is_refused():
    with pytest.raises(ConfigError, match="num_classes is 0"):
        build_model("resnet18", 0)


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """A module of the user's, `own_models`."""
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "SIZE = 3\n"
        "class Line(nn.Linear):\n"
        "    def __init__(self, num_classes, inputs=4):\n"
        "        super().__init__(inputs, num_classes)\n"
        "def make(num_classes, *, name='a'):\n"
        "    model = nn.Linear(2, num_classes)\n"
        "    model.name = name\n"
        "    return model\n"
        "def make_nothing(num_classes): pass\n"
        "def make_class(num_classes): return Line\n"
        "def fail(num_classes): return len(num_classes)\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\nraise KeyError('seed')\n")
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for module in ("own_models", "broken", "unreadable", "needs_more"):
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("own_models")
def test_a_function_or_class_that_can_be_imported_makes_a_model():
    assert build_model("own_models:make", 7).out_features == 7
    assert build_model("own_models:make", 7, name="b").name == "b"
    line = build_model("own_models:Line", 7, inputs=9)
    assert (line.in_features, line.out_features) == (9, 7)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_models:", 'is not "module:function"'),
        (":make", 'is not "module:function"'),
        ("own_models:make:it", 'is not "module:function"'),
        ("own-models:make", 'is not "module:function"'),
        ("nowhere_to_be_found:make", "there is no module 'nowhere_to_be_found'"),
        ("nowhere_to_be_found.models:make", "there is no module 'nowhere_to_be_found'"),
        ("needs_more:make", r"importing 'needs_more' failed in .*needs_more.py:1: .*not_there_at_all"),
        ("broken:make", r"importing 'broken' failed in .*broken.py:2: KeyError: 'seed'"),
        ("unreadable:make", r"importing 'unreadable' failed in .*unreadable.py:1: SyntaxError"),
        ("own_models:makes", "has no 'makes'; it has Line, fail, make, make_class, make_nothing"),
        ("own_models:SIZE", "'SIZE' is of type int; expected a function or class"),
        ("own_models:make_nothing", "returned a NoneType; expected an instance of torch.nn.Module"),
        ("own_models:make_class", "returned the class Line; expected an instance"),
    ],
)
def test_what_makes_no_model_is_told_by_its_cause(name, said):
    with pytest.raises(ConfigError, match=said):
        build_model(name, 10)


@pytest.mark.usefixtures("own_models")
def test_an_error_in_the_users_own_function_stays_what_it_is():
    with pytest.raises(TypeError, match="has no len"):
        build_model("own_models:fail", 10)
    with pytest.raises(ConfigError, match=r"cannot be called with num_classes, size.*its options are: name"):
        build_model("own_models:make", 10, size=3)


def test_a_model_converts_to_synchronised_batch_normalisation():
    with torch.device("meta"):
        for name in ("resnet50", "googlenet"):
            model = build_model(name, 10)
            norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
            converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            found = [module for module in converted.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
            assert len(found) == len(norms) > 50
            assert all(type(module) is nn.SyncBatchNorm for module in found)

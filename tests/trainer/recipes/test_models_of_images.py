"""What the convolutional models compute, on tiny images and narrow layers."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models import LogitsWithAuxiliary, build_model, combine_losses, main_logits
from datasvc.trainer.recipes.models.resnet import BottleneckBlock, ResidualBlock, ResNet

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 5

# Whole but cheap: narrow fully connected layers, few blocks, the smallest images.
TINY = {
    "small-cnn": (lambda: build_model("small-cnn", CLASSES), 16),
    "resnet": (lambda: ResNet(ResidualBlock, (1, 1, 1, 1), CLASSES, zero_init_residual=False), 32),
    "bottleneck": (
        lambda: ResNet(BottleneckBlock, (1, 1, 1, 1), CLASSES, zero_init_residual=False, small_input=True),
        16,
    ),
    "alexnet": (lambda: build_model("alexnet", CLASSES, hidden=32), 63),
    "alexnet-bn": (lambda: build_model("alexnet", CLASSES, hidden=32, batch_norm=True), 63),
    "googlenet": (lambda: build_model("googlenet", CLASSES), 32),
    "inception-v3": (lambda: build_model("inception-v3", CLASSES, auxiliary=False), 75),
    "vgg16": (lambda: build_model("vgg16", CLASSES, hidden=32), 32),
}


@pytest.fixture(params=sorted(TINY))
def tiny(request):
    """A model and a batch that it takes."""
    make, size = TINY[request.param]
    torch.manual_seed(0)
    return make(), torch.randn(4, 3, size, size)


def loss_of(output):
    labels = torch.arange(4) % CLASSES
    return combine_losses(output, lambda logits: F.cross_entropy(logits.float(), labels))


def test_gradients_reach_each_parameter(tiny):
    model, images = tiny
    loss_of(model(images)).backward()
    unreached = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert unreached == []


def test_in_evaluation_a_model_gives_the_same_logits_again_and_in_either_memory_format(tiny):
    model, images = tiny
    model.eval()
    with torch.no_grad():
        logits = model(images)
        assert logits.shape == (4, CLASSES)
        assert torch.equal(logits, model(images))
        model.to(memory_format=torch.channels_last)
        last = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, logits, rtol=1e-4, atol=1e-5)


def test_a_step_works_channels_last_in_bfloat16(tiny):
    model, images = tiny
    model.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images.to(memory_format=torch.channels_last))
    assert main_logits(output).dtype == torch.bfloat16
    loss_of(output).backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bottleneck", pytest.param("googlenet", marks=pytest.mark.slow)])
def test_a_compiled_model_gives_what_the_plain_one_does(name):
    torch.manual_seed(0)
    make, size = TINY[name]
    model, images = make().eval(), torch.randn(2, 3, size, size)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.slow
def test_a_compiled_model_in_training_keeps_its_auxiliary_logits():
    make, size = TINY["googlenet"]
    output = torch.compile(make(), backend="eager", fullgraph=True)(torch.randn(4, 3, size, size))
    assert isinstance(output, LogitsWithAuxiliary)
    loss_of(output).backward()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (512, 7)),
        ("resnet50", (2048, 7)),
        ("alexnet", (256, 6)),
        ("vgg16", (512, 7)),
        ("googlenet", (1024, 7)),
    ],
)
def test_images_of_224_leave_as_many_positions_as_the_papers_say(name, shape):
    with torch.device("meta"):
        model = build_model(name, 10).eval()
        seen = []
        model.pool.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
        model(torch.zeros(1, 3, 224, 224))
    channels, side = shape
    assert seen == [(1, channels, side, side)]


def test_inception_v3_has_the_grids_of_the_paper_and_an_auxiliary_classifier_on_the_second():
    with torch.device("meta"):
        model = build_model("inception-v3", 10)
        seen = []
        for grid in (model.grid_35, model.grid_17, model.grid_8):
            grid.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
        output = model(torch.zeros(2, 3, 299, 299))
        assert seen == [(2, 288, 35, 35), (2, 768, 17, 17), (2, 2048, 8, 8)]
        assert (output.logits.shape, output.weight) == ((2, 10), 0.4)
        assert [logits.shape for logits in output.auxiliary] == [(2, 10)]
        with pytest.raises(ConfigError, match="auxiliary=true have 298x298 pixels; expected at least 299x299"):
            model(torch.zeros(2, 3, 298, 298))
        assert model.eval()(torch.zeros(2, 3, 298, 298)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "smallest"),
    [("alexnet", 63), ("vgg16", 32), ("googlenet", 15), ("inception-v3", 75), ("resnet50", 1)],
)
def test_any_size_from_the_smallest_up_is_taken(name, smallest):
    with torch.device("meta"):
        model = build_model(name, 10).eval()
        for height, width in ((smallest, smallest), (smallest + 70, smallest), (160, 288)):
            assert model(torch.zeros(1, 3, height, width)).shape == (1, 10)
        if smallest > 1:
            with pytest.raises(
                ConfigError, match=f"have 200x{smallest - 1} pixels; expected at least {smallest}x{smallest}"
            ):
                model(torch.zeros(1, 3, 200, smallest - 1))
        with pytest.raises(ConfigError, match=r"have the shape \[3, 64, 64\]; expected \[batch, channels"):
            model(torch.zeros(3, 64, 64))


@pytest.mark.parametrize("block", [ResidualBlock, BottleneckBlock])
def test_every_residual_block_begins_as_its_shortcut(block):
    model = ResNet(block, (2, 1, 1, 1), CLASSES)
    features = torch.rand(2, 64, 8, 8)  # as behind a rectifier: not negative
    identities = 0
    for stage in model.stages:
        for residual in stage:
            expected = F.relu(residual.shortcut(features))
            if isinstance(residual.shortcut, nn.Identity):
                identities += 1
                assert torch.equal(expected, features)
            features = residual(features)
            assert torch.equal(features, expected)
    assert identities == (2 if block is ResidualBlock else 1)
    grown = ResNet(block, (2, 1, 1, 1), CLASSES, zero_init_residual=False).stages[0][1]
    features = torch.rand(2, 64 * block.expansion, 8, 8)
    assert not torch.equal(grown(features), features)


def test_a_bottleneck_strides_in_its_3x3_convolution():
    with torch.device("meta"):
        model = build_model("resnet50", 10)
    strided = [
        module.kernel_size
        for stage in model.stages
        for name, module in stage.named_modules()
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2) and "branch" in name
    ]
    assert strided == [(3, 3)] * 3


def test_a_small_inputs_stem_keeps_the_resolution():
    images = torch.zeros(1, 3, 32, 32, device="meta")
    with torch.device("meta"):
        assert build_model("resnet18", 10, small_input=True).eval().stem(images).shape == (1, 64, 32, 32)
        assert build_model("resnet18", 10).eval().stem(images).shape == (1, 64, 8, 8)


def test_convolutions_begin_with_the_variance_that_rectifiers_keep():
    torch.manual_seed(0)
    convolution = build_model("resnet18", CLASSES).stages[3][0].branch[0]  # 256 to 512: fan-in and fan-out differ
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    model = build_model("alexnet", CLASSES, hidden=256)
    assert model.classifier[1].weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert not model.classifier[1].bias.any()


def test_auxiliary_classifiers_speak_in_training_only():
    make, size = TINY["googlenet"]
    model, images = make(), torch.randn(2, 3, size, size)
    output = model(images)
    assert isinstance(output, LogitsWithAuxiliary)
    assert main_logits(output).shape == (2, CLASSES)
    assert [logits.shape for logits in output.auxiliary] == [(2, CLASSES)] * 2
    assert isinstance(model.eval()(images), torch.Tensor)
    assert isinstance(build_model("googlenet", CLASSES, auxiliary=False)(images), torch.Tensor)


def test_auxiliary_losses_count_with_their_weight():
    output = LogitsWithAuxiliary(torch.tensor(1.0), (torch.tensor(10.0), torch.tensor(100.0)), 0.3)
    assert combine_losses(output, lambda logits: logits).item() == pytest.approx(1 + 0.3 * 110)
    assert combine_losses(torch.tensor(5.0), lambda logits: logits).item() == 5
    assert build_model("googlenet", 2).train()(torch.randn(2, 3, 32, 32)).weight == 0.3


@pytest.mark.parametrize(
    ("name", "rates"), [("alexnet", {0.5}), ("vgg16", {0.5}), ("googlenet", {0.4, 0.7}), ("inception-v3", {0.5})]
)
def test_dropout_is_where_the_papers_have_it(name, rates):
    with torch.device("meta"):
        model = build_model(name, 10)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == rates

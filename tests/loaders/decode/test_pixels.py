"""What becomes of decoded pixels, against arithmetic in double precision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.loaders.decode.pixels import PixelFormat, PixelWriter

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PRECISION = {"uint8": 0.0, "float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}


def written(image, output, layout, flip):
    """Return an image as a format has it, as `float64[height, width, 3]`."""
    pixels = PixelFormat(output, layout, MEAN, STD)
    out = np.empty(pixels.shape(1, len(image)), pixels.dtype)[0]
    PixelWriter(pixels, len(image)).write(image, out, flip=flip)
    found = torch.from_numpy(out).view(torch.bfloat16) if output == "bfloat16" else torch.from_numpy(out)
    upright = found.permute(1, 2, 0) if layout == "NCHW" else found
    return upright.double().numpy()


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(sorted(PRECISION)), st.sampled_from(["NCHW", "NHWC"]), st.booleans()
)
def test_every_format_holds_the_same_numbers(seed, output, layout, flip):
    image = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    upright = (image[:, ::-1] if flip else image).astype(np.float64)
    expected = upright if output == "uint8" else (upright / 255 - MEAN) / STD
    error = np.abs(written(image, output, layout, flip) - expected)
    assert (error <= PRECISION[output] * np.maximum(1, np.abs(expected))).all()


def test_bfloat16_is_rounded_as_torch_rounds_it():
    levels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)
    floats = torch.from_numpy(written(levels, "float32", "NHWC", flip=False)).float()
    halves = written(levels, "bfloat16", "NHWC", flip=False)
    assert np.array_equal(floats.to(torch.bfloat16).double().numpy(), halves)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": "int8"}, "output is 'int8'; expected one of uint8, float32"),
        ({"layout": "CHW"}, "layout is 'CHW'"),
        ({"mean": (0.5, 0.5)}, "mean is"),
        ({"std": (0.2, 0.2, 0.0)}, "std is .* above 0"),
        ({"std": (0.2, 0.2, float("nan"))}, "std is"),
    ],
)
def test_a_format_out_of_range_is_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        PixelFormat(**changed)

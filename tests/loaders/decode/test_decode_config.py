"""What a user may ask of decoding."""

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "opencv"}, "decode is 'opencv'; expected one of auto, cpu, gpu, gpu-window, gpu-whole, pillow"),
        ({"num_threads": 0}, "num_threads is 0; expected at least 1"),
        ({"prefetch": -1}, "prefetch is -1; expected at least 0"),
        ({"on_bad": "skip"}, "on_bad is 'skip'; expected one of raise, mask"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**settings)

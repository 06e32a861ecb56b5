"""Scaling of decoded windows to the size of a batch's images, with the bilinear filter of torch or of Pillow.

Both filters are anti-aliased, and their results differ by at most one level of 255. Torch is six times as fast.
Pillow is for callers without torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from datasvc.loaders.decode.backend import Framework
from datasvc.loaders.decode.pixels import Pixels


def make_resizer(framework: Framework, size: int) -> Callable[[Pixels], Pixels]:
    """Return a function, for use in one thread, that scales `uint8[height, width, 3]` to `uint8[size, size, 3]`.

    Each result is valid until the next call. "torch" selects torch's kernel, "numpy" Pillow's, without torch.
    """
    if framework == "torch":
        return _make_torch_resizer(size)
    return lambda window: np.asarray(Image.fromarray(window).resize((size, size), Image.Resampling.BILINEAR))


def _make_torch_resizer(size: int) -> Callable[[Pixels], Pixels]:
    """Return a resizer with torch's kernel for bytes, which reads channels-last pixels and starts no threads."""
    import torch

    # The operator behind `interpolate(mode="bilinear", antialias=True)`; this variant writes to existing memory.
    scale = torch.ops.aten._upsample_bilinear2d_aa.out  # noqa: SLF001 - the operator's name
    scaled = torch.empty(1, size, size, 3, dtype=torch.uint8, device="cpu")
    out, pixels = scaled.permute(0, 3, 1, 2), scaled[0].numpy()

    def resize(window: Pixels) -> Pixels:
        source = torch.from_numpy(window).permute(2, 0, 1).unsqueeze(0)
        scale(source, [size, size], False, None, None, out=out)  # no align_corners, no scale factors
        return pixels

    return resize

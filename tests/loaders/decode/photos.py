"""Photographs to decode, windows of them, and backends of the CPU."""

import numpy as np

from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.loaders.profiling.step_profiler import StepProfiler
from tests.samples import jpeg

SIZE = 24
LEVELS = {"output": "uint8", "layout": "NHWC"}


def config(batch_size=8, num_threads=2, prefetch=2, output="float32", layout="NCHW"):
    pixels = PixelFormat(output, layout, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    return BackendConfig(batch_size=batch_size, size=SIZE, pixels=pixels, num_threads=num_threads, prefetch=prefetch)


def on_cpu(backend="cpu", framework="torch", **settings):
    return CpuBackend(config(**settings), backend=backend, framework=framework, profiler=StepProfiler())


def photos(number, seed=0, width=90, height=70):
    return [np.frombuffer(jpeg(width, height, seed=seed + k, quality=95), np.uint8) for k in range(number)]


def windows(number, width=90, height=70, seed=0):
    rng = np.random.default_rng(seed)
    shapes = rng.integers(1, (height, width), (number, 2)).astype(np.int32)
    starts = rng.integers(0, (height, width) - shapes + 1).astype(np.int32)
    return Windows(starts, shapes, rng.integers(0, 2, number).astype(np.int32))


def decode(backend, images, crops):
    backend.feed(images, crops)
    return backend.take()


def broken(image):
    """Return a JPEG whose header is right, and whose Huffman table cannot be."""
    content = bytearray(image.tobytes())
    table = content.index(b"\xff\xc4")
    content[table + 5 : table + 21] = b"\xff" * 16
    return np.frombuffer(bytes(content), np.uint8)

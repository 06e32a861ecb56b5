"""Finds the decoding backends that a loader can use, and creates a backend by its name.

If there are several, `DecodeChoice` chooses one of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Final

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.loaders.decode.backend import Backend, BackendConfig, Decode, Framework, ImageBackend
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.gpu.dali import Graph
from datasvc.loaders.decode.gpu.gpu import GpuBackend
from datasvc.loaders.decode.gpu.upload import ColourBackend, UploadBackend
from datasvc.loaders.decode.pixels import import_codec
from datasvc.loaders.profiling.step_profiler import StepProfiler

ON_GPU: Final[Sequence[Backend]] = ("gpu-window", "gpu-whole")
"""Backends that decode on a GPU."""


def find_missing() -> dict[Backend, str]:
    """Return the backends that lack software on this machine, with a message for each."""
    missing: dict[Backend, str] = {}
    try:
        import_codec()
    except ConfigError as error:
        missing["cpu"] = str(error)
    # `nvidia` is searched first: without this parent package, the search for `nvidia.dali` raises an error.
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        reason = f"decoding on a GPU needs DALI, which is not installed: {how_to_install('gpu')}"
        missing |= dict.fromkeys(ON_GPU, reason)
    return missing


def plan_candidates(
    requested: Decode,
    *,
    on_gpu: bool,
    has_transform: bool,
    missing: Mapping[Backend, str],
    has_other_images: bool = False,
    has_servers: bool = False,
) -> Sequence[Backend]:
    """Return the possible backends, at least one; if there are several, trials measure which is fastest.

    Args:
        requested: backend of the user's `DecodeConfig`.
        on_gpu: whether the images are delivered on a GPU.
        has_transform: whether the user has a transform, which runs on the CPU.
        missing: backends that cannot be used here, with a message for each.
        has_other_images: whether samples have several images, or one whose size is not stored.
        has_servers: whether other machines decode a part of the images.

    Raises:
        ConfigError: the requested backend cannot be used; the message has the reason.
    """
    refused = dict(missing)  # backends that cannot be used, with the reason for each
    if has_transform:
        refused |= dict.fromkeys(ON_GPU, "a transform changes images on the CPU; use decode='cpu', or no transform")
    if has_other_images:
        reason = "images other than the column 'image' are decoded on the CPU; use decode='cpu' or 'auto'"
        refused |= dict.fromkeys(ON_GPU, reason)
    if has_servers:
        refused |= dict.fromkeys(ON_GPU, "decode servers decode as a CPU does; use decode='cpu', or no servers")
    if not on_gpu:
        refused |= dict.fromkeys(ON_GPU, f"decode={requested!r} leaves the images on a GPU; give device='cuda' too")
    if requested != "auto" and requested != "gpu":  # noqa: PLR1714 - a set would not narrow the type
        if requested in refused:
            raise ConfigError(refused[requested])
        return [requested]
    usable: list[Backend] = [backend for backend in ON_GPU if backend not in refused]
    if requested == "gpu":
        if not usable:
            raise ConfigError(refused[ON_GPU[0]])  # the reason is the same for both
        return usable
    # The first candidate decodes on the CPU: it is used if no trial succeeds.
    return ["pillow" if "cpu" in refused else "cpu", *usable]


def make_backend(
    config: BackendConfig, backend: Backend, *, framework: Framework, profiler: StepProfiler
) -> ImageBackend:
    """Return a new backend.

    Raises:
        ConfigError: the software of the backend is not installed.
        DeviceError: the GPU cannot be used.
    """
    if backend in ON_GPU:
        # The CPU decodes what DALI does not, at the scale of DALI.
        config = dataclasses.replace(config, decode_scale="full")
        graph: Graph = "window" if backend == "gpu-window" else "whole"
        make: type[ColourBackend | GpuBackend] = ColourBackend if config.changes_colours else GpuBackend
        return make(config, graph, profiler=profiler)
    if config.device_id is None:
        return CpuBackend(config, backend=backend, framework=framework, profiler=profiler)
    return UploadBackend(config, backend=backend, device=f"cuda:{config.device_id}", profiler=profiler)

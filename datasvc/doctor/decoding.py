"""Checks which decoder an `ImageLoader` uses on this machine, and whether GPUs, driver and packages fit together."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from datasvc.doctor.finding import Finding
from datasvc.extras import how_to_install
from datasvc.loaders.decode.choice.choose import find_missing, plan_candidates

# The oldest driver for Linux that runs programs of a major version of CUDA, from NVIDIA's table of compatibility.
_OLDEST_DRIVER: Final = {"cuda120": 525, "cuda130": 580}


def examine_decoding(environment: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on GPUs and decoders. Imports torch if there is a GPU.

    Args:
        environment: the result of `describe_environment`, for its fields `gpus` and `driver`.
    """
    gpus, driver = environment.get("gpus"), environment.get("driver")
    if gpus:
        names = ", ".join(f"{count} x {name}" for name, count in gpus.items())
        yield Finding("gpu", "ok", f"{names}, driver {driver or 'unknown'}")
        yield _examine_torch()
    elif driver:
        yield Finding("gpu", "warning", f"driver {driver} lists no GPU", "run nvidia-smi, which says more")
    else:
        yield Finding("gpu", "ok", "no GPU of NVIDIA; everything runs on the CPU")
    if driver:
        yield from _examine_dali(int(driver.partition(".")[0]))
    yield examine_decoder(has_gpu=bool(gpus))


def examine_decoder(*, has_gpu: bool) -> Finding:
    """Return the decoder that `decode="auto"` uses here, and why."""
    missing = find_missing()
    candidates = plan_candidates("auto", on_gpu=has_gpu, has_transform=False, missing=missing)
    if len(candidates) > 1:
        text = (
            f"the fastest of {', '.join(candidates)}, which a loader with device='cuda' measures on its first batches"
        )
        return Finding("decoder", "ok", text)
    if has_gpu:
        text = f"{candidates[0]!r}: {missing['gpu-window']}"
        return Finding("decoder", "warning", text, how_to_install("gpu"))
    if candidates[0] == "pillow":
        return Finding("decoder", "warning", f"'pillow', which is slower: {missing['cpu']}", how_to_install("images"))
    return Finding("decoder", "ok", "'cpu': nvImageCodec decodes only the window of each image")


def _examine_torch() -> Finding:
    """Return whether torch can use the GPUs."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "warning", "torch is not installed", how_to_install("torch"))
    import torch

    if torch.cuda.is_available():
        return Finding("torch", "ok", f"torch {torch.__version__} finds {torch.cuda.device_count()} GPUs")
    builds = "install a build for your driver: https://pytorch.org/get-started/locally"
    return Finding("torch", "warning", f"torch {torch.__version__} finds no GPU", builds)


def _examine_dali(driver: int) -> Iterator[Finding]:
    """Yield a problem if DALI is for a CUDA that the driver is too old for."""
    for cuda, oldest in _OLDEST_DRIVER.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(f"nvidia-dali-{cuda}")
            name = f"DALI {version} for CUDA {cuda[4:6]}"
            if driver >= oldest:
                yield Finding("dali", "ok", name)
            else:
                text = f"{name} needs driver {oldest} or newer; this one is {driver}"
                yield Finding("dali", "problem", text, f"renew the driver, or {how_to_install('gpu-cu12')}")

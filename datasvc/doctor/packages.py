"""Checks installed packages and their versions, the decoder of images, and whether GPUs, driver and CUDA fit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from datasvc import __version__
from datasvc.doctor.finding import Finding
from datasvc.extras import CORE, EXTRAS, PURPOSES, how_to_install, packages_of, quote_packages
from datasvc.loaders.decode.choice.choose import find_missing, plan_candidates

# For developers, and names of several extras together.
_NOT_LISTED: Final = frozenset({"docs", "demo", "all"})
# Packages with the same modules: where the one is installed, the other must not be.
_INSTEAD: Final = {"images": "gpu-cu12", "gpu": "gpu-cu12", "gpu-cu12": "gpu"}


# The oldest driver for Linux that runs programs of a major version of CUDA, from NVIDIA's table of compatibility.
_OLDEST_DRIVER: Final = {"cuda120": 525, "cuda130": 580}


def examine_packages(core: Sequence[str] = CORE, extras: Iterable[str] = EXTRAS) -> Iterator[Finding]:
    """Yield findings on the packages that datasvc needs, and on the extras: each missing one with what it adds.

    Args:
        core: requirements of datasvc itself, such as "numpy>=2.0".
        extras: names of the extras to look for.
    """
    yield Finding("version", "ok", f"datasvc {__version__}, Python {platform.python_version()}")
    broken = [text for requirement in core if (text := _fault(requirement))]
    installed = ", ".join(f"{_name(requirement)} {_version(requirement)}" for requirement in core)
    advice = f"pip install {quote_packages(core)}"
    yield (
        Finding("packages", "problem", "; ".join(broken), advice) if broken else Finding("packages", "ok", installed)
    )
    for extra in extras:
        is_replaced = extra in _INSTEAD and _missing(extra) and not _missing(_INSTEAD[extra])
        if extra not in _NOT_LISTED and not is_replaced:
            yield _examine_extra(extra)


def _examine_extra(extra: str) -> Finding:
    """Return the finding on an extra. A missing one is no fault: most users need few of them."""
    requirements = packages_of(extra)
    check = f"extra {extra}"
    if missing := _missing(extra):
        text = f"not installed ({', '.join(missing)}); it adds {PURPOSES[extra]}"
        return Finding(check, "ok", text, how_to_install(extra))
    old = [text for requirement in requirements if (text := _fault(requirement))]
    if old:
        return Finding(check, "warning", "; ".join(old), how_to_install(extra))
    return Finding(check, "ok", ", ".join(f"{_name(each)} {_version(each)}" for each in requirements))


def _missing(extra: str) -> list[str]:
    """Return the names of the packages of an extra that are not installed."""
    return [_name(requirement) for requirement in packages_of(extra) if _version(requirement) is None]


def _fault(requirement: str) -> str:
    """Return why a requirement is not met, or ""."""
    name, version = _name(requirement), _version(requirement)
    if version is None:
        return f"{name} is not installed"
    floor = re.search(r">=([\d.]+)", requirement)
    if floor and _numbers(version) < _numbers(floor[1]):
        return f"{name} is {version}, older than {floor[1]}"
    return ""


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _version(requirement: str) -> str | None:
    try:
        return importlib.metadata.version(_name(requirement))
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare; a local part, as in "2.13.0+cpu", does not count."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


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

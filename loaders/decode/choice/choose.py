"""Which backends may decode, from what was asked for and what this machine has; and the fastest of those measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

from datasvc.errors import ConfigError
from datasvc.loaders.decode.backend import Backend
from datasvc.loaders.decode.crop import import_codec

Decode = Literal["auto", "cpu", "gpu", "gpu-window", "gpu-whole", "pillow"]

ON_GPU: Final[Sequence[Backend]] = ("gpu-window", "gpu-whole")
"""Those that decode on a GPU: they are tried in a process of their own before one is used."""


def find_missing() -> dict[Backend, str]:
    """Return the backends that this machine lacks the software for, and what to do about each."""
    missing: dict[Backend, str] = {}
    try:
        import_codec()
    except ConfigError as error:
        missing["cpu"] = str(error)
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        reason = "a GPU decodes with DALI, which is not installed; install nvidia-dali-cuda130"
        missing |= dict.fromkeys(ON_GPU, reason)
    return missing


def plan_candidates(
    wanted: Decode, *, on_gpu: bool, has_transform: bool, missing: Mapping[Backend, str]
) -> Sequence[Backend]:
    """Return the backends that may decode, at least one; more than one are to be tried and measured.

    Args:
        wanted: by the user.
        on_gpu: whether images shall lie on a GPU.
        has_transform: whether a transform of the user's changes the images, which is done on the CPU.
        missing: backends that cannot be used here, and why.

    Raises:
        ConfigError: what is wanted cannot be had; says why.
    """
    if wanted not in get_args(Decode):
        raise ConfigError(f"decode is {wanted!r}; expected one of {', '.join(get_args(Decode))}")
    refused = dict(missing)
    if has_transform:
        refused |= dict.fromkeys(ON_GPU, "a transform changes images on the CPU; use decode='cpu', or no transform")
    if not on_gpu:
        refused |= dict.fromkeys(ON_GPU, f"decode={wanted!r} leaves the images on a GPU; give device='cuda' too")
    if wanted != "auto" and wanted != "gpu":  # noqa: PLR1714 - a set would not narrow the type
        if wanted in refused:
            raise ConfigError(refused[wanted])
        return [wanted]
    able: list[Backend] = [backend for backend in ON_GPU if backend not in refused]
    if wanted == "gpu":
        if not able:
            raise ConfigError(refused[ON_GPU[0]])
        return able
    # One of the CPU is always among them: it is what is left where no GPU decodes.
    return ["pillow" if "cpu" in refused else "cpu", *able]


def choose_fastest(rates: Mapping[Backend, float]) -> Backend:
    """Return the backend with the highest rate; the first of equals."""
    return max(rates, key=lambda backend: rates[backend])

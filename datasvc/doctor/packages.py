"""Checks which packages are installed, and in versions that are not too old."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from datasvc import __version__
from datasvc.doctor.finding import Finding
from datasvc.extras import CORE, EXTRAS, PURPOSES, how_to_install, packages_of, quote_packages

# For developers, and names of several extras together.
_NOT_LISTED: Final = frozenset({"docs", "demo", "all"})
# Packages with the same modules: where the one is installed, the other must not be.
_INSTEAD: Final = {"images": "gpu-cu12", "gpu": "gpu-cu12", "gpu-cu12": "gpu"}


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

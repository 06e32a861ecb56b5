"""Makes an environment with the oldest versions that pyproject.toml allows: `make lowest` tests in it.

    .venv/bin/python tools/lowest_environment.py FOLDER EXTRA ...

It has the packages of datasvc itself and of the extras. Everything else, such as pytest and torch, is that of the
environment that runs this program. A floor below the oldest version that fits the others is an error: nobody can
install it. With --newer-core, this is checked for the extras alone: frameworks need some newer packages of the core.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from datasvc.extras import CORE, packages_of

ROOT = Path(__file__).parents[1]
# Not taken from the index, where they are of several gigabytes, with CUDA.
LEFT_OUT = ("torch", "torchvision")
# For the tests: the boto3 of moto has to fit the botocore of s3fs.
ADDED = {"s3fs": ("boto3>=1.41",)}


def requirements_of(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the core and of extras, without those that are left out."""
    found = dict.fromkeys([*CORE, *(package for extra in extras for package in packages_of(extra))])
    requirements = []
    for requirement in found:
        name, floor = split(requirement)
        if name not in LEFT_OUT:
            requirements += [f"{name}>={floor}", *ADDED.get(name, ())]
    return requirements


def split(requirement: str) -> tuple[str, str]:
    """Return name and floor of a requirement, without extras and upper limit; without a floor, it is "0"."""
    name, _, floor = requirement.partition(">=")
    return name.partition("[")[0], floor.partition(",")[0] or "0"


def raised_floors(requirements: Iterable[str], installed: dict[str, str]) -> list[str]:
    """Return what is wrong with floors: one is wrong if another version than that of the floor was installed.

    Args:
        requirements: such as "numpy>=2.0".
        installed: version by name, names in lower case with hyphens. 2.0.3 is of the floor 2.0, 2.1.0 is not.
    """
    wrong = []
    for requirement in requirements:
        name, floor = split(requirement)
        version = installed[name.lower().replace("_", "-")]
        if floor != "0" and not f"{version}.".startswith(f"{floor}."):
            wrong.append(f"{requirement}: the oldest version that fits the others is {version}")
    return wrong


def make(folder: Path, extras: Iterable[str], *, newer_core: bool) -> None:
    """Make the environment. Raise SystemExit if a floor cannot be installed, of the core unless `newer_core`."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", "uv"], check=True)
    requirements = requirements_of(extras)
    with tempfile.TemporaryDirectory() as parent:
        listed, left_out = Path(parent, "list.txt"), Path(parent, "left_out.txt")
        listed.write_text("\n".join(requirements))
        left_out.write_text("\n".join(f"{name}; python_version < '3'" for name in LEFT_OUT))
        words = [folder / "bin" / "uv", "pip", "install", "--quiet", "--python", python]
        words += ["--resolution", "lowest-direct", "--only-binary", ":all:"]
        subprocess.run([*words, "--override", left_out, "--requirement", listed], check=True)
    frozen = subprocess.run(
        [folder / "bin" / "uv", "pip", "freeze", "--python", python], check=True, capture_output=True, text=True
    ).stdout
    installed = dict(re.findall(r"^([\w.-]+)==(\S+)$", frozen, re.MULTILINE))
    checked = [each for each in requirements if not (newer_core and each in CORE)]
    wrong = raised_floors(checked, {name.lower().replace("_", "-"): installed[name] for name in installed})
    if wrong:
        raise SystemExit("floors of pyproject.toml that cannot be installed:\n" + "\n".join(wrong))
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "zz_rest.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages


def main() -> None:
    """Make an environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("extras", nargs="+")
    parser.add_argument("--newer-core", action="store_true")
    settings = parser.parse_args()
    make(settings.folder, settings.extras, newer_core=settings.newer_core)


if __name__ == "__main__":
    main()

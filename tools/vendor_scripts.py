"""Fetches the scripts that the page of `datasvc ui` and its tests contain, by `python tools/vendor_scripts.py`.

`vendor_scripts.json` lists the npm packages with version and integrity, and the digest of each file that is taken
from them. The scripts are in the repository because clusters have no internet, and only this program changes them. To
update one, change its version and `integrity` (`npm view NAME@VERSION dist.integrity`) and run the program with
--update, which writes the new digests of the files.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MANIFEST = Path(__file__).with_suffix(".json")
_TIMEOUT_S = 120


class WrongFileError(Exception):
    """A package or a file is not the one that the manifest names."""


def read_manifest() -> list[dict[str, Any]]:
    """Return the packages: `name`, `version`, `license`, `integrity`, and `files` with `path`, `target`, `sha256`."""
    packages: list[dict[str, Any]] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return packages


def extract(archive: bytes, package: Mapping[str, Any], *, update: bool = False) -> dict[str, bytes]:
    """Return the files of a package by target, after checks.

    Args:
        archive: the .tgz file of the package.
        package: its entry in the manifest.
        update: whether the digests in the entry are those of an older version, and are not checked.

    Raises:
        WrongFileError: the archive or a file has another digest, or the archive lacks a file.
    """
    digest = f"sha512-{base64.b64encode(hashlib.sha512(archive).digest()).decode()}"
    if digest != package["integrity"]:
        raise WrongFileError(
            f"{package['name']}@{package['version']} has the integrity {digest}; expected {package['integrity']}"
        )
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for file in package["files"]:
            try:
                member = tar.extractfile(f"package/{file['path']}")
            except KeyError:
                member = None
            if member is None:
                raise WrongFileError(f"{package['name']}@{package['version']} has no file {file['path']}")
            content = member.read()
            found = hashlib.sha256(content).hexdigest()
            if found != file["sha256"] and not update:
                raise WrongFileError(f"{file['path']} has the SHA-256 {found}; expected {file['sha256']}")
            files[file["target"]] = content
    return files


def fetch(package: Mapping[str, Any]) -> bytes:
    """Return the .tgz file of a package from the npm registry, by the client npm."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"{package['name']}@{package['version']}"
        command = ["npm", "pack", name, "--silent", "--ignore-scripts", "--pack-destination", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        (archive,) = Path(folder).iterdir()
        return archive.read_bytes()


def main(arguments: list[str] | None = None) -> int:
    """Write all files of the manifest; return 1 if a package is not the one that it names."""
    parser = argparse.ArgumentParser(description="Fetch the scripts of the page from the npm registry.")
    parser.add_argument("--update", action="store_true", help="write the digests of the files to the manifest")
    chosen = parser.parse_args(arguments)
    packages = read_manifest()
    for package in packages:
        try:
            files = extract(fetch(package), package, update=chosen.update)
        except WrongFileError as error:
            sys.stderr.write(f"{error}; nothing of this package was written\n")
            return 1
        for file in package["files"]:
            (ROOT / file["target"]).write_bytes(files[file["target"]])
            file["sha256"] = hashlib.sha256(files[file["target"]]).hexdigest()
            print(f"{package['name']} {package['version']}: {file['target']}")
    if chosen.update:
        MANIFEST.write_text(json.dumps(packages, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

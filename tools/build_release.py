"""Builds the wheels and the source archive of a release: `python tools/build_release.py dist --url URL`.

Equal sources give equal bytes: the time of the files is that of the last commit (or `SOURCE_DATE_EPOCH`), and their
order, owners and modes are fixed. Relative links of the README become links to the tag of the version below `--url`,
because a package index shows the README alone. The sources do not contain this address.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BUILD = """
import sys
from setuptools import build_meta
target = sys.argv[1]  # the backend changes the arguments
build_meta.build_sdist(target)
build_meta.build_wheel(target)
"""
_PICTURES = (".svg", ".png")


def build(target: Path, *, url: str | None = None) -> list[Path]:
    """Build the files of a release from the sources of this checkout, without those that git ignores.

    Args:
        target: folder for the files; created if needed.
        url: address of the project; None: the README keeps its relative links, and the files name no addresses.

    Returns:
        The source archive and the wheel, and the wheel of datasvc-horovod.
    """
    target.mkdir(parents=True, exist_ok=True)
    time_s = int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "source"), Path(folder, "built")
        built.mkdir()
        copy_sources(source)
        if url is not None:
            name_addresses(source, url.rstrip("/"))
        # The backend of pyproject.toml, called directly: an isolated build would install it from an index again.
        variables = {**os.environ, "SOURCE_DATE_EPOCH": str(time_s)}
        # The second changes a file of the sources, which belongs into the archive as it is.
        for project, out in ((source, built), (source / "tools" / "horovod_compat", built / "horovod")):
            if project != source:
                name_requirement(project / "pyproject.toml", read_version(source))
            out.mkdir(exist_ok=True)
            words = [sys.executable, "-c", _BUILD, out]
            subprocess.run(words, cwd=project, check=True, capture_output=True, env=variables, umask=0o022)
        (archive,), wheels = built.glob("*.tar.gz"), [*built.glob("*.whl"), *built.glob("horovod/*.whl")]
        pack_again(archive, target / archive.name, time_s)
        for wheel in wheels:
            shutil.copyfile(wheel, target / wheel.name)
    return [target / archive.name, *(target / wheel.name for wheel in wheels)]


def name_requirement(project: Path, version: str) -> None:
    """Make datasvc-horovod depend on this release or a later one, and give it a version that grows with it."""
    numbers = [int(number) for number in version.split(".")]
    post = sum(number * 100**place for place, number in enumerate(reversed(numbers)))
    text = project.read_text(encoding="utf-8")
    text = text.replace("dependencies = []", f'dependencies = ["datasvc[train]>={version}"]')
    # The release of Horovod whose interface it has, and a post-release number: an index takes each version only once.
    text = re.sub(r'(?m)^version = "([^"]+)"', rf'version = "\1.post{post}"', text)
    project.write_text(text, encoding="utf-8")


def copy_sources(target: Path) -> None:
    """Copy the files that git does not ignore, with modes that do not depend on the umask."""
    for name in _git("ls-files", "-zco", "--exclude-standard").split("\0"):
        path = ROOT / name
        if not name or not os.path.lexists(path):
            continue  # deleted, and not committed yet
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def name_addresses(source: Path, url: str) -> None:
    """Make the links of the README absolute, and add the addresses of the project to the metadata."""
    version = read_version(source)
    readme = source / "README.md"
    readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), url, f"v{version}"), encoding="utf-8")
    pages = f"{url}/blob/v{version}"
    addresses = {
        "Homepage": url,
        "Documentation": f"{pages}/docs/index.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
    project = source / "pyproject.toml"
    with project.open("a", encoding="utf-8") as file:
        file.write(f"\n[project.urls]\n{lines}")


def absolute_links(text: str, url: str, tag: str) -> str:
    """Return Markdown text whose relative links and pictures lead to files of a tag below `url`."""

    def absolute(match: re.Match[str]) -> str:
        path = match[1]
        kind = "raw" if path.endswith(_PICTURES) else "blob"
        return f"]({url}/{kind}/{tag}/{path})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)


def read_version(source: Path) -> str:
    """Return `__version__` of the package in a source folder, without importing it."""
    tree = ast.parse((source / "datasvc" / "__init__.py").read_text(encoding="utf-8"))
    (version,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"
    ]
    return str(version)


def pack_again(archive: Path, target: Path, time_s: int) -> None:
    """Write a .tar.gz anew: files sorted by name, of one time, and owned by nobody in particular."""
    with (
        tarfile.open(archive) as old,
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=time_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = time_s, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, content)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Build, and print the SHA-256 of each file as `sha256sum` does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the files")
    parser.add_argument("--url", help="address of the project, such as https://HOST/OWNER/NAME; a release needs it")
    arguments = parser.parse_args()
    for path in build(arguments.out, url=arguments.url):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")


if __name__ == "__main__":
    main()

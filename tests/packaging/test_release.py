"""The files of a release: complete, accepted by a package index, and equal whenever they are built."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string

import pytest

import datasvc
from datasvc.extras import CORE
from tests.packaging.conftest import URL
from tools.build_release import ROOT, absolute_links, build


def digests(paths):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return message_from_string(archive.read(name).decode())


def test_links_of_the_readme_lead_to_the_files_of_the_tag():
    text = "![p](docs/a.svg) [q](docs/b.md#c) [r](https://x.y/z) [s](#t)"
    made = absolute_links(text, "https://h/o/n", "v1")
    assert made == (
        "![p](https://h/o/n/raw/v1/docs/a.svg) [q](https://h/o/n/blob/v1/docs/b.md#c) [r](https://x.y/z) [s](#t)"
    )


@pytest.mark.slow
def test_two_builds_give_equal_bytes(release, tmp_path, monkeypatch):
    before = os.umask(0o077)
    try:
        again = build(tmp_path, url=URL)
    finally:
        os.umask(before)
    assert digests(again) == digests(release)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    later = digests(build(tmp_path, url=URL))
    assert all(later[name] != digest for name, digest in digests(release).items())


@pytest.mark.slow
def test_the_metadata_has_what_a_package_index_shows(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("datasvc", datasvc.__version__)
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "The datasvc maintainers")
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    assert f"Homepage, {URL}" in metadata.get_all("Project-URL")
    needed = [requirement for requirement in metadata.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert needed == list(CORE)
    targets = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    own = [target.partition("#")[0].removeprefix(f"{URL}/") for target in targets if target.startswith(URL)]
    files = [path.split("/", maxsplit=2)[2] for path in own]  # after "blob" and the tag
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.slow
def test_the_release_has_the_package_name_horovod_which_needs_this_release(release):
    with zipfile.ZipFile(release[2]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
        assert {name for name in archive.namelist() if "dist-info" not in name} == {"horovod.py"}
    assert metadata["Name"] == "datasvc-horovod"
    assert metadata["Version"].startswith("0.28.1.post")
    assert metadata["Requires-Dist"] == f"datasvc[train]>={datasvc.__version__}"


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(release, wheel, tmp_path):
    with tarfile.open(release[0]) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    assert not [name for name in names if "/tests/" in name or "/build/" in name]
    (source,) = tmp_path.iterdir()
    program = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (built,) = source.glob("*.whl")
    contents = []
    for path in (wheel, built):
        with zipfile.ZipFile(path) as archive:
            contents.append({info.filename: info.CRC for info in archive.infolist()})
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_twine_accepts_the_files(release, index, tmp_path):
    constraints = ("--constraint", ROOT / "constraints.txt")
    words = [sys.executable, "-m", "pip", "install", *index, *constraints, "--target", tmp_path / "tools", "twine"]
    subprocess.run(words, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *release],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "tools"), "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 3

"""The wheel and the source archive of this checkout, and a package index where there is one."""

import subprocess
import sys

import pytest

from tools.build_release import build

URL = "https://example.org/team/datasvc"
SMALL_PACKAGE = "annotated-doc==0.0.7"  # some kilobytes


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """The source archive, the wheel, and the wheel of datasvc-horovod."""
    return build(tmp_path_factory.mktemp("release"), url=URL)


@pytest.fixture(scope="session")
def wheel(release):
    return release[1]


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel and nothing that it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run(words, check=True)
    return folder


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    """Options of pip for the index of packages; skips without one."""
    folder = tmp_path_factory.mktemp("probe")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, SMALL_PACKAGE]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    return ["--quiet", "--disable-pip-version-check"]

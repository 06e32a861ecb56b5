"""Several users of one repository: a reader changes nothing, and a group of writers shares all that it writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.repository import Repository
from tests.models.entries import commit_entry
from tests.samples import write_folder
from tests.shards.written_versions import write_version

ROOT = Path(__file__).parents[2]
FIRST, SECOND, GROUP = 65533, 65534, 65534
COMMAND = "import os, sys; os.umask(0o{}); sys.argv[0] = 'datasvc'; from datasvc.cli.main import main; main()"

# As another user who may read all files of this machine, so that the interpreter is found.
BECOME = [
    "--regid",
    str(GROUP),
    "--clear-groups",
    "--inh-caps",
    "+dac_read_search",
    "--ambient-caps",
    "+dac_read_search",
]


def may_become():
    setpriv = shutil.which("setpriv")
    command = [setpriv, "--reuid", str(FIRST), *BECOME, "true"]
    return setpriv is not None and not subprocess.run(command, capture_output=True, check=False).returncode


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not may_become(), reason="may not become another user with a capability, by setpriv"),
]


def run_as(user, *words, umask="022", **variables):
    """Run a command as another user."""
    command = ["setpriv", "--reuid", user, *BECOME, sys.executable, "-c", COMMAND.format(umask), *words]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables},
        cwd=ROOT,
        check=False,
    )


@pytest.fixture
def open_folder(tmp_path):
    """A folder that others may enter, which pytest's own is not; its name has no meaning."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.name.startswith(("pytest-", "popen-", "test_")):
            folder.chmod(0o755)
    return tmp_path


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.timeout(300)
def test_a_user_who_may_only_read_uses_everything_and_changes_nothing(open_folder):
    repository = Repository.create(str(open_folder / "repo"))
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "a"}, {"key": "b", "text": "b"}]]})
    commit_entry(repository, "cnn", message="m")
    images = write_folder(open_folder / "images", {"train": {"cat": 2}})
    own = open_folder / "own"
    own.mkdir()
    os.chown(own, SECOND, GROUP)
    before = files_below(open_folder / "repo")
    environment = {"DATASVC_REPO": repository.url, "HOME": str(own)}
    reads = ["ls", "log pets", "show pets", "head pets", "verify pets", "models ls", "models log cnn"]
    for words in [*reads, f"stage pets --cache {own}/cache --budget 1MB"]:
        done = run_as(SECOND, *words.split(), **environment)
        assert done.returncode == 0, (words, done.stderr)
    writes = [f"ingest {images} dogs", "tag pets@1 good", "delete pets --where key='a'", "models tag cnn@1 good"]
    for words in [*writes, "models rm cnn@1", "gc --yes"]:
        done = run_as(SECOND, *words.split(), **environment)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), (words, done.stderr)
        assert done.stderr.startswith("error: "), (words, done.stderr)
        assert "ermission" in done.stderr or "may not" in done.stderr, (words, done.stderr)
    assert files_below(open_folder / "repo") == before


@pytest.mark.timeout(300)
def test_the_cache_of_another_user_is_refused(open_folder):
    repository = Repository.create(str(open_folder / "repo"))
    write_version(repository, "pets", {"train": [[{"key": "a", "text": "a"}]]})
    for user in (FIRST, SECOND):
        (open_folder / str(user)).mkdir()
        os.chown(open_folder / str(user), user, GROUP)
    words = ["stage", "pets", "--cache", open_folder / str(FIRST) / "cache", "--budget", "1MB"]
    assert run_as(FIRST, *words, DATASVC_REPO=repository.url).returncode == 0
    before = files_below(open_folder / str(FIRST))
    refused = run_as(SECOND, *words, DATASVC_REPO=repository.url)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False), refused.stderr
    assert "is not readable" in refused.stderr
    assert files_below(open_folder / str(FIRST)) == before


@pytest.mark.timeout(300)
def test_a_group_with_one_umask_writes_one_repository(open_folder):
    shared = open_folder / "shared"
    shared.mkdir()
    os.chown(shared, FIRST, GROUP)
    shared.chmod(0o2775)
    images = [write_folder(open_folder / f"images{n}", {"train": {"cat": 2 + n}}) for n in range(3)]
    environment = {"DATASVC_REPO": str(shared / "repo"), "HOME": str(open_folder)}
    for number, user in enumerate((FIRST, SECOND, FIRST)):
        done = run_as(user, "ingest", images[number], f"pets{number % 2}", umask="002", **environment)
        assert done.returncode == 0, done.stderr
        tagged = run_as(FIRST + SECOND - user, "tag", f"pets{number % 2}", "good", umask="002", **environment)
        assert tagged.returncode == 0, tagged.stderr
    swept = run_as(SECOND, "gc", "--grace", "0s", "--no-writers", "--yes", umask="002", **environment)
    assert swept.returncode == 0, swept.stderr
    assert run_as(FIRST, "verify", "pets1", umask="002", **environment).returncode == 0

"""Real images, repositories and an S3 server for all tests."""

import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from datasvc.repository import Repository
from datasvc.shards import DatasetVersion, ingest, open_dataset
from tests import required, selection
from tests.examples import FAST
from tests.said import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown, say  # noqa: F401 - hooks
from tests.samples import write_folder
from tests.support import azure_server, gcs_process, s3_server, servers, warm_python
from tests.support.moto_process import KEY, SECRET, MotoServer
from tests.support.ports import reserved_ports

# A slow machine is no failure: what a property costs is not what its test is about. Equal code gets equal examples, a
# change is judged by what it changed. `make test` tries few of them, `make test-all` sets HYPOTHESIS_PROFILE=all;
# "explore" looks for new ones.
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=FAST)
settings.register_profile("all", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

ROOT = Path(__file__).parents[1]

gc.disable()  # until all tests are collected: nearly all that is made until then stays


def pytest_configure(config):
    config.pluginmanager.register(selection)
    config.pluginmanager.register(required)


def pytest_collection_finish():
    # The collector need not look, in each test, at the hundreds of modules that stay. What tests make is not frozen:
    # cycles that hold open files would stay open.
    gc.collect()
    gc.freeze()
    gc.enable()


# A shell starts `make test &` with SIGINT ignored, and the tests of Ctrl-C and their processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, ROOT / "tools" / "make_digits.py", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def digits(digits_folder, tmp_path_factory) -> DatasetVersion:
    """Data set `digits@1` in a repository that tests share and do not change: 8 training shards."""
    repository = Repository.create(str(tmp_path_factory.mktemp("shared") / "repo"))
    ingest(repository, str(digits_folder), "digits", shard_bytes=256 << 10)
    return open_dataset(repository, "digits@1")


@pytest.fixture
def tmp_path(request, tmp_path) -> Iterator[Path]:
    """The folder of pytest, or one on the disk for a test that depends on the file system."""
    with selection.folder_of(request.node, tmp_path) as folder:
        yield folder


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A new folder, in memory if it has room and TMPDIR names no other: a busy disk is slow to flush many files."""
    memory = Path("/dev/shm")
    has_room = "TMPDIR" not in os.environ and memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as folder:
        yield Path(folder)


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository.create(str(tmp_path / "repo"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three classes, 26 images in two splits."""
    return write_folder(tmp_path / "source", {"train": {"a": 7, "b": 5, "c": 8}, "val": {"a": 3, "b": 3}})


@pytest.fixture(scope="module")
def one_thread():
    """Layers this small only wait for each other in several threads."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def warm_workers():
    """Start worker processes that `multiprocessing` spawns from a process that has imported what they need."""
    with warm_python.workers():
        yield


@pytest.fixture
def without_an_experiment():
    """Have MLflow forget the experiment that a test sets: it would be that of later tests, and of their children."""
    yield
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].tracking.fluent._active_experiment_id = None


@pytest.fixture(scope="session")
def s3_bucket(tmp_path_factory):
    """Return the URL of a new bucket on a server that runs for the session.

    That is the one that AWS_ENDPOINT_URL names, else a Ceph gateway started here where it is installed, else moto's,
    which is in the dev extra; the end of the test run says which. `tests/support/servers.py` can ask for moto's.
    """
    import s3fs

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if servers.are_replaced() or "AWS_ENDPOINT_URL" not in os.environ:
            endpoint, key, secret = _start_s3(tmp_path_factory, stack)
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            patch.setenv("AWS_ACCESS_KEY_ID", key)
            patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            patch.delenv("AWS_DEFAULT_REGION", raising=False)
        s3fs.S3FileSystem.clear_instance_cache()  # a client that an earlier test made is one for another server
        bucket = f"datasvc-{secrets.token_hex(4)}"
        s3fs.S3FileSystem().mkdir(bucket)
        yield f"s3://{bucket}"


@pytest.fixture(scope="session")
def azure_container(tmp_path_factory):
    """Return the URL of a new container on an Azurite that runs for the session; skip where none is installed."""
    if reason := azure_server.refusal():
        pytest.skip(f"no Azure Blob Storage: {reason}")
    import adlfs

    server = azure_server.AzureServer(tmp_path_factory.mktemp("azurite")).start()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(server.close)
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", server.connection_string)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        container = f"datasvc-{secrets.token_hex(4)}"
        adlfs.AzureBlobFileSystem().mkdir(container)
        yield f"abfs://{container}"


@pytest.fixture(scope="session")
def google_bucket():
    """Return the URL of a new bucket on a GCS emulator that runs for the session; skip where none is installed."""
    yield from gcs_process.serve()


def _start_s3(tmp_path_factory, stack):
    refusal = s3_server.refusal()
    if refusal is None:
        ports = stack.enter_context(reserved_ports(3))
        server = s3_server.CephServer(tmp_path_factory.mktemp("ceph"), ports).start()
        stack.callback(server.close)
        say("S3 tests ran against a Ceph gateway")
        return server.url, s3_server.KEY, s3_server.SECRET
    if "radosgw" in os.environ.get(required.REQUIRED, "").split():
        pytest.fail(f"{required.REQUIRED} has radosgw: {refusal}")
    moto = MotoServer().start()
    stack.callback(moto.close)
    say(f"S3 tests ran against moto ({refusal})")
    return moto.url, KEY, SECRET

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import pyarrow as pa
import pytest

from datasvc.repository import Repository
from datasvc.shards.format.schema import shard_schema
from tests.distributed.elastic_jobs import NUM_STEPS, SAME_SIZE, TWO_HOSTS, ElasticJobs
from tests.shards.written_versions import write_table
from tests.support import warm_python

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 90.0
BLOCK = 8


@dataclass(frozen=True)
class Launcher:
    """Starts the real launcher in a process of its own."""

    environ: dict
    started: list = field(default_factory=list)

    def command(self, num_ranks, *command, options=()):
        return [sys.executable, "-m", "datasvc.trainer.launch", "-np", str(num_ranks), *options, *map(str, command)]

    def start(self, num_ranks, *command, options=()):
        process = subprocess.Popen(
            self.command(num_ranks, *command, options=options),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, num_ranks, *command, options=(), timeout_s=TIMEOUT_S):
        """Runs to the end; if that takes too long, kills the launcher and, through its guard, the ranks."""
        process = self.start(num_ranks, *command, options=options)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            pytest.fail(f"hung; printed so far:\n{output}\n{errors}")
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def program(self, name):
        return PROGRAMS / name

    def run_with_torchrun(self, num_ranks, program):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
        ]
        return subprocess.run(
            [*command, str(PROGRAMS / program)],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def run_program(self, num_ranks, program, *arguments, timeout_s=TIMEOUT_S):
        """Runs one of our programs on every rank and fails with its output if it fails."""
        done = self.run(num_ranks, warm_python.command(), PROGRAMS / program, *arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture
def launcher():
    launcher = Launcher({**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    yield launcher
    for process in launcher.started:
        process.kill()
        process.communicate()


@pytest.fixture
def has_ended():
    """Whether a process is gone, or a zombie, or will be soon."""

    def check(pid, timeout_s=20.0):
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                return bool(wait([fd], timeout_s))
            finally:
                os.close(fd)
        return True

    return check


@pytest.fixture(scope="session")
def blocks(tmp_path_factory):
    """A repository with a split of 120 blocks: its URL and the digest of the split's table."""
    repository = Repository.create(str(tmp_path_factory.mktemp("tokens") / "repo"))
    fields = [pa.field("key", pa.string(), nullable=False), pa.field("tokens", pa.list_(pa.uint16(), BLOCK))]
    samples = [{"key": str(n), "tokens": list(range(n * BLOCK, (n + 1) * BLOCK))} for n in range(120)]
    table = write_table(repository.objects, [samples[:50], samples[50:]], shard_schema(fields))
    return repository.url, repository.objects.put(table.encode()).digest


@pytest.fixture
def elastic(launcher, blocks, tmp_path):
    return ElasticJobs(launcher, blocks, tmp_path)


_undisturbed = {}


@pytest.fixture
def undisturbed(elastic):
    """The result of two ranks on this machine whom nothing happens."""
    if not _undisturbed:
        _undisturbed.update(elastic.result(2, (*SAME_SIZE, *TWO_HOSTS)))
    assert len(_undisturbed["losses"]) == NUM_STEPS
    return _undisturbed

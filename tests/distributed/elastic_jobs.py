"""Elastic jobs of ``programs/elastic_training.py``, and what must hold of their results."""

import json
import subprocess

import pytest

from tests.support import warm_python

TWO_HOSTS = ("-H", "localhost:1,127.0.0.1:1")
# A dead rank is replaced at once, so that sizes and with them all bits stay as they were.
SAME_SIZE = ("--min-num-proc", "2", "--blacklist-cooldown-range", "0.01", "0.01")
NUM_STEPS = 20
# Each rank that replaces another loads torch anew.
JOB_TIMEOUT_S = 240.0


class ElasticJobs:
    """Runs the program under the launcher."""

    def __init__(self, launcher, blocks, folder):
        self.launcher, self.blocks, self.folder = launcher, blocks, folder
        self.num_runs = 0

    def start(self, num_ranks, options, **told):
        self.num_runs += 1
        self.result_path = self.folder / f"result.{self.num_runs}.json"
        program = self.launcher.program("elastic_training.py")
        arguments = [warm_python.command(), program, *self.blocks, self.result_path, json.dumps(told)]
        return Running(self.launcher.start(num_ranks, *arguments, options=options), self.result_path)

    def run(self, num_ranks, options, **told):
        return self.start(num_ranks, options, **told).end()

    def result(self, num_ranks, options, **told):
        return self.start(num_ranks, options, **told).result()


class Running:
    """A job that was started."""

    def __init__(self, process, result_path):
        self.process, self.result_path = process, result_path
        self.output, self.errors = "", ""

    def read_until(self, words):
        """Returns when the job has printed a line with these words."""
        while words not in (line := self.process.stdout.readline()):
            assert line, f"{self.output}\n{self.process.stderr.read()}"
            self.output += line
        self.output += line

    def hear(self, words):
        """Returns when the launcher has said these words."""
        while words not in (line := self.process.stderr.readline()):
            assert line, f"{self.errors}\n{self.process.stdout.read()}"
            self.errors += line
        self.errors += line

    def end(self):
        try:
            output, errors = self.process.communicate(timeout=JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, errors = self.process.communicate()
            pytest.fail(f"hung; printed so far:\n{self.output}{output}\n{self.errors}{errors}")
        self.output += output
        self.errors += errors
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, self.output, self.errors)

    def result(self):
        done = self.end()
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return {**json.loads(self.result_path.read_text()), "output": done.stdout, "errors": done.stderr}


class ListedHosts:
    """A file that a discovery script prints."""

    def __init__(self, folder, *hosts):
        self.path, self._new_path = folder / "hosts", folder / "new_hosts"
        self.options = ("--host-discovery-script", f"cat {self.path}")
        self.set(*hosts)

    def set(self, *hosts):
        self._new_path.write_text("".join(f"{host}\n" for host in hosts))
        self._new_path.replace(self.path)


def check_each_sample_once(result):
    for epoch in (0, 1):
        positions = sorted(p for number, batch in result["served"] for p in batch if number == epoch)
        assert positions == list(range(120))


def check_equal(result, undisturbed, names=("losses", "served", "sizes", "weights")):
    check_each_sample_once(result)
    for name in names:
        assert result[name] == undisturbed[name], name


def check_alike(result, undisturbed):
    """Sums in another order differ in their last bits."""
    check_equal(result, undisturbed, ["served"])
    assert result["losses"] == pytest.approx(undisturbed["losses"], rel=1e-4)
    for mine, wanted in zip(result["weights"], undisturbed["weights"], strict=True):
        assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-5)

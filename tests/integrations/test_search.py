"""The searches for settings of examples/ with Optuna and Ray Tune: trials are models, and a study continues.

Skipped where these packages are not installed.
"""

import runpy
import signal
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from tests.support import warm_python
from tests.support.ray_cluster import ray_cluster

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Runs a program that kills itself once its first checkpoint is committed.
KILLED = """
import os, runpy, signal, sys
from datasvc.trainer.recipes.reporting.events import JsonEvents
JsonEvents.report = lambda self, event, **_: event == "checkpoint" and os.kill(os.getpid(), signal.SIGKILL)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def url(digits_folder, tmp_path_factory):
    """A repository with 48 digits to train on, and a model to start from."""
    url = str(tmp_path_factory.mktemp("search") / "repo")
    ingest(Repository.create(url), str(digits_folder / "val"), "digits", val_fraction=0.5, limit=96)
    train(TrainConfig(repo=url, data="digits@1", name="base", size=16, batch_size=8, epochs=1, max_steps=1))
    return url


def words_of(url, study, num_trials, *more):
    words = ["--repo", url, "--data", "digits@1", "--study", study, "--init-from", "base@1", "--size", "16"]
    return [*words, "--batch-size", "8", "--epochs", "1", "--trials", str(num_trials), *map(str, more)]


def read_trials(url, study):
    """Return the entries of the first and of the last version of each trial, and the versions with the tag."""
    models = datasvc.open(url).models
    names = [name for name in models.names() if name.startswith(f"{study}-")]
    best = [f"{name}@{models.tags(name)['best']}" for name in names if "best" in models.tags(name)]
    return {name: [models.describe(str(each)).entry for each in models.versions(name)] for name in names}, best


def check_trials(url, study, num_trials):
    """Check that trials are models with settings of their own and one start, and that the best has the tag."""
    trials, (best,) = read_trials(url, study)
    assert len(trials) == num_trials
    assert {entries[0]["parent"] for entries in trials.values()} == {"base@1"}
    assert len({entries[-1]["config"]["learning_rate"] for entries in trials.values()}) == num_trials
    assert {entries[-1]["config"]["decode_group"] for entries in trials.values()} == {study}
    accuracies = {name: entries[-1]["metrics"]["val_accuracy"] for name, entries in trials.items()}
    assert accuracies[best.partition("@")[0]] == max(accuracies.values())
    return trials


@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed")
class TestOptuna:
    def search(self, url, tmp_path, *arguments, runner=()):
        """Run the program, by default itself; return its exit status."""
        words = words_of(url, *arguments, "--storage", f"sqlite:///{tmp_path}/study.db")
        command = [warm_python.command(), *runner, str(ROOT / "examples/search_optuna.py"), *words]
        return subprocess.run(command, check=False, cwd=tmp_path).returncode

    def test_a_study_continues_where_it_ended(self, url, tmp_path):
        assert self.search(url, tmp_path, "study", 1) == 0
        first = check_trials(url, "study", 1)
        assert self.search(url, tmp_path, "study", 2) == 0
        assert check_trials(url, "study", 2).items() >= first.items()

    def test_the_trial_of_a_killed_process_continues_its_newest_version(self, url, tmp_path):
        arguments = ("killed", 1, "--checkpoint-every", "1")
        assert self.search(url, tmp_path, *arguments, runner=["-c", KILLED]) == -signal.SIGKILL
        trials, best = read_trials(url, "killed")
        assert (set(trials), best) == ({"killed-0"}, [])
        with sqlite3.connect(tmp_path / "study.db") as database:  # as if the process had been silent for long
            database.execute("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
        assert self.search(url, tmp_path, *arguments) == 0
        continued = check_trials(url, "killed", 1)["killed-0"]
        assert [entry["parent"] for entry in continued[1:]] == [f"killed-0@{n}" for n in range(1, len(continued))]
        assert len({entry["config"]["learning_rate"] for entry in continued}) == 1


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_tune_runs_trials_at_the_same_time_and_restores_a_study(url, tmp_path, monkeypatch):
    words = words_of(url, "ray", 2, "--storage", tmp_path / "studies")
    program = ROOT / "examples/search_ray.py"
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    with ray_cluster():
        runpy.run_path(str(program), run_name="__main__")
        trials = check_trials(url, "ray", 2)
        runpy.run_path(str(program), run_name="__main__")
        assert check_trials(url, "ray", 2) == trials, "a complete study trains no more"

"""Keras on each of its backends that we support, in programs that are killed and stopped."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.testing import small_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed"),
]
ROOT = Path(__file__).parents[2]
NUM_SAMPLES, BATCH, EPOCHS = 20, 4, 3  # no save is at the end of an epoch of five steps
STEPS_OF_EPOCH = NUM_SAMPLES // BATCH


@pytest.fixture
def repo(tmp_path):
    small_dataset(str(tmp_path / "repo"), "pets", samples=NUM_SAMPLES)
    return datasvc.open(str(tmp_path / "repo"))


@pytest.fixture(params=[pytest.param("jax", marks=pytest.mark.long), "torch"])
def backend(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def run_program(backend, program, *words):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    environ |= {"JAX_PLATFORMS": "cpu", "KERAS_HOME": str(words[-1])}
    command = [sys.executable, *program, *map(str, words[:-1])]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def train(backend, repo, name, folder, *, after=0, number=0):
    """Train; send a signal after so many steps of the process."""
    program = [ROOT / "tests/integrations/keras_training.py"]
    done = run_program(backend, program, repo.repository.url, name, after, int(number), folder)
    assert done.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0), done.stderr


def test_a_killed_and_a_stopped_training_continue_to_the_same_bits(backend, repo, tmp_path):
    train(backend, repo, "whole", tmp_path)
    whole = repo.models.restore("whole")
    assert whole.entry["step"] == EPOCHS * STEPS_OF_EPOCH
    # At the third save the first is committed, there is room for two that are not.
    train(backend, repo, "parts", tmp_path, after=STEPS_OF_EPOCH + 3, number=signal.SIGKILL)
    first = repo.models.restore("parts").entry["step"]
    assert first in {2, 4, 6, 8}
    last = 2 * STEPS_OF_EPOCH
    train(backend, repo, "parts", tmp_path, after=last - first, number=signal.SIGTERM)  # at the end of one
    assert repo.models.restore("parts").entry["step"] == last
    train(backend, repo, "parts", tmp_path)
    found = repo.models.restore("parts")
    assert found.entry["step"] == whole.entry["step"]
    check_equal(found.state, whole.state)
    keys = repo.dataset("pets@1")["train"].to_arrow(columns=["key"])["key"].to_pylist()
    uses = repo.models.trained_on([str(found.version)], keys=keys).all_uses()
    served = sorted((use.epoch, use.position) for use in uses)
    assert served == [(epoch, position) for epoch in range(EPOCHS) for position in range(NUM_SAMPLES)]


def check_equal(one, other, path=""):
    if isinstance(other, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(other, dict):
        assert one.keys() == other.keys(), path
        for name in other:
            check_equal(one[name], other[name], f"{path}/{name}")
    elif isinstance(other, list | tuple):
        for number, value in enumerate(other):
            check_equal(one[number], value, f"{path}/{number}")
    else:
        assert one == other, path


PROGRAM = """
import sys

import keras
import numpy as np
import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.integrations.keras import KerasVersions, LoaderBatches
from datasvc.loaders import ImageLoader
from tests.integrations.keras_training import make_model, to_inputs

repo = datasvc.open(sys.argv[1])
split, served = repo.dataset("pets@1")["train"], []


def to_noted_inputs(batch):
    served.append((batch.epoch, int(batch.positions[0])))
    return to_inputs(batch)


options = {"batch_size": 4, "size": 8, "training": True}
with ImageLoader(split, **options | {"training": False}) as validation, ImageLoader(split, **options) as loader:
    model, held_out = make_model(), LoaderBatches(validation, transform=to_noted_inputs)
    one, other = (model.evaluate(held_out, verbose=0) for _ in range(2))
    starts = list(range(0, 20, 4))
    # Before them, Keras takes one or two batches to build the model.
    assert one == other and [start for _, start in served][-10:] == [*starts, *starts]
    fresh, begin = make_model(), loader.state_dict()
    fresh.fit(LoaderBatches(loader, transform=to_noted_inputs), epochs=1, verbose=0)
    assert sorted(served[-5:]) == [(0, start) for start in starts]  # not after those that it took to build the model
    loader.load_state_dict(begin)
    model.jit_compile = False
    batches = LoaderBatches(loader, transform=to_inputs)
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=4 if keras.backend.backend() == "jax" else 1)
    with KerasVersions(repo, "several", batches, every=1) as versions:
        model.fit(batches, epochs=1, callbacks=[versions], verbose=0)
    assert repo.models.restore("several").entry["step"] == 5
    renamed = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(4, name="other")])
    renamed.compile(optimizer="sgd", loss="mse")
    with KerasVersions(repo, "several", batches) as versions, pytest.raises(ConfigError, match="other variables"):
        renamed.fit(batches, epochs=2, initial_epoch=versions.restore(), callbacks=[versions], verbose=0)
"""


def test_validation_reads_the_same_samples_each_time_and_another_model_is_refused(backend, repo, tmp_path):
    done = run_program(backend, ["-c", PROGRAM], repo.repository.url, tmp_path)
    assert done.returncode == 0, done.stderr

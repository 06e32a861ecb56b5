"""JAX with our loaders and versions: in this process, in two processes of one cluster, and in a killed program."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, StateMismatchError
from datasvc.loaders import ImageLoader
from datasvc.testing import small_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed"),
]
ROOT = Path(__file__).parents[2]
NUM_SAMPLES, BATCH, EPOCHS = 24, 4, 2


@pytest.fixture
def repo(tmp_path):
    small_dataset(str(tmp_path / "repo"), "pets", samples=NUM_SAMPLES)
    return datasvc.open(str(tmp_path / "repo"))


@pytest.fixture
def jax():
    import jax  # slow to import

    return jax


def run(program, *words, expected=0):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / f"tests/integrations/{program}", *map(str, words)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == expected, done.stderr


def test_a_killed_training_continues_to_the_same_bits_and_reads_each_sample_once(repo):
    run("jax_training.py", repo.repository.url, "whole", 0)
    run("jax_training.py", repo.repository.url, "killed", 5, expected=-signal.SIGKILL)
    run("jax_training.py", repo.repository.url, "killed", 0)
    whole, found = (repo.models.restore(name) for name in ("whole", "killed"))
    assert found.entry["step"] == whole.entry["step"] == EPOCHS * NUM_SAMPLES // BATCH
    assert sorted(found.state["train"]) == sorted(whole.state["train"])
    for name, tensor in whole.state["train"].items():
        assert torch.equal(found.state["train"][name], tensor), name
    keys = repo.dataset("pets@1")["train"].to_arrow(columns=["key"])["key"].to_pylist()
    uses = repo.models.trained_on([str(found.version)], keys=keys).all_uses()
    served = sorted((use.epoch, use.position) for use in uses)
    assert served == [(epoch, position) for epoch in range(EPOCHS) for position in range(NUM_SAMPLES)]


def test_two_processes_make_global_arrays_of_their_parts(repo, tmp_path):
    run("jax_cluster.py", repo.repository.url, tmp_path)
    with ImageLoader(repo.dataset("pets@1")["train"], batch_size=BATCH, training=True, size=8) as loader:
        expected = [np.array(labels) for _, labels in loader.numpy()]
    for process in range(2):
        found = np.load(tmp_path / f"{process}.npz")
        assert found["global"].tolist() == np.concatenate(expected).tolist()  # each process computed with all of them


def test_batches_are_arrays_of_their_own_in_the_order_of_the_loader(repo, jax):
    from datasvc.integrations.jax import batches

    split = repo.dataset("pets@1")["train"]
    options = {"batch_size": BATCH, "training": True, "size": 8}
    with ImageLoader(split, **options) as loader:
        expected = [(images.copy(), labels.copy()) for images, labels in loader.numpy()]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    for sharding in (None, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))):
        with ImageLoader(split, **options) as loader:
            found = list(batches(loader, sharding))
            assert loader.epoch == 1
        assert all(isinstance(array, jax.Array) for pair in found for array in pair)
        for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
            assert np.array_equal(images, expected_images)
            assert np.array_equal(labels, expected_labels)
    with ImageLoader(split, **options) as loader:
        (first, *_) = batches(loader, transform=lambda batch: {"positions": batch.positions})
    assert first["positions"].tolist() == [0, 1, 2, 3]


def test_the_leaves_to_restore_like_are_not_copied(repo, jax, monkeypatch):
    from datasvc.integrations import jax as ours

    like = {"bias": jax.numpy.arange(3.0), "key": jax.random.key(0), "half": jax.numpy.ones(2, jax.numpy.bfloat16)}
    state = ours.to_state(like)
    # As a leaf of which other processes have parts.
    monkeypatch.setattr(type(like["bias"]), "is_fully_addressable", False)
    monkeypatch.setattr(type(like["bias"]), "is_fully_replicated", False)
    monkeypatch.setattr(ours, "_from_tensor", lambda tensor, _: tensor)
    assert ours.from_state(state, like)["bias"].tolist() == [0, 1, 2]
    with pytest.raises(StateMismatchError, match=r"half is torch.bfloat16\[2\], expected torch.float32\[3\]"):
        ours.from_state(state, {**like, "half": like["bias"]})


def test_a_pytree_comes_back_with_its_types_shapes_and_structure(repo, jax):
    from datasvc.integrations.jax import from_state, to_state

    tree = {
        "layers": [jax.numpy.ones((2, 3), jax.numpy.bfloat16), {"bias": jax.numpy.arange(3.0)}],
        "key": jax.random.key(7),
        "count": 3,
        "rate": 0.5,
        "host": np.arange(4, dtype=np.int8),
    }
    saved = repo.models.save("net", {"tree": to_state(tree)}, step=1)
    state = repo.models.restore(str(saved)).state["tree"]
    assert sorted(state) == ["count", "host", "key", "layers/0", "layers/1/bias", "rate"]
    blank = {**tree, "layers": [jax.numpy.zeros((2, 3), jax.numpy.bfloat16), {"bias": jax.numpy.zeros(3)}]}
    found = from_state(state, {**blank, "key": jax.random.key(0), "count": 0, "rate": 0.0})
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert (found["count"], found["rate"], type(found["count"])) == (3, 0.5, int)
    assert found["layers"][0].dtype == jax.numpy.bfloat16
    assert jax.random.uniform(found["key"]) == jax.random.uniform(tree["key"])
    for name, tensor in to_state(tree).items():
        assert torch.equal(to_state(found)[name], tensor), name
    with pytest.raises(StateMismatchError, match=r"count is missing; host is torch.int8\[4\], expected .*\[5\]"):
        from_state(
            {name: state[name] for name in state if name != "count"}, {**tree, "host": np.arange(5, dtype=np.int8)}
        )
    with pytest.raises(ConfigError, match="name is str"):
        to_state({"name": "text"})

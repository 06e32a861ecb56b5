"""The checkpoints of examples/ with Lightning and accelerate, in processes that are killed.

Skipped where these packages are not installed.
"""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ingest

ROOT = Path(__file__).parents[2]
NUM_STEPS = 48  # four epochs of 12 batches
PARTS = {
    "lightning": ("state_dict", "optimizer_states", "lr_schedulers", "rank_state"),
    "accelerate": ("net", "optimizer", "schedule", "loader", "rank_state"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def url(digits_folder, tmp_path_factory):
    url = str(tmp_path_factory.mktemp("frameworks") / "repo")
    ingest(Repository.create(url), str(digits_folder), "digits", limit=96)
    return url


@pytest.fixture(params=PARTS)
def framework(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def begin(framework, url, name, every):
    program = ROOT / f"examples/{framework}_checkpoints.py"
    words = ["--repo", url, "--data", "digits@1", "--name", name, "--epochs", "4", "--every", str(every)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen([sys.executable, program, *words], env=environ, stdout=subprocess.PIPE, text=True)


def run(*arguments):
    process = begin(*arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def end_at(line_start, number, *arguments):
    """Send a signal as soon as a line that begins so is printed; return the exit status."""
    process = begin(*arguments)
    for line in process.stdout:
        if line.startswith(line_start):
            process.send_signal(number)
            break
    process.communicate(timeout=120)
    return process.returncode


def newest(url, name):
    found = datasvc.open(url).models.restore(name)
    assert found.entry["step"] == NUM_STEPS
    return found


def check_equal(one, other, place=""):
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            check_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            check_equal(left, right, f"{place}.{number}")
    else:
        assert one == other, place


@pytest.fixture
def whole(framework, url):
    """The newest version of a run that nobody disturbed."""
    name = f"{framework}-whole"
    if not Repository.open(url).living("models", name):
        run(framework, url, name, 12)
    return newest(url, name)


# In the middle of epochs, and at their ends, where Lightning leaves a loader at its last batch.
@pytest.mark.parametrize("every", [5, 12])
def test_a_killed_training_goes_on_to_the_same_bits(framework, url, whole, every):
    name = f"{framework}-killed-{every}"
    # At the third save the first is committed: there is room for two that are not.
    assert end_at(f"step {3 * every}:", signal.SIGKILL, framework, url, name, every) == -signal.SIGKILL
    assert Repository.open(url).living("models", name)
    run(framework, url, name, every)
    found = newest(url, name)
    for part in PARTS[framework]:
        check_equal(found.state[part], whole.state[part], part)
    assert found.entry["parent"] == f"{name}@{found.version.version - 1}"


def test_a_training_that_is_told_to_end_commits_its_last_step_and_goes_on_from_it(framework, url, whole):
    name = f"{framework}-told"
    assert end_at("step 3:", signal.SIGTERM, framework, url, name, 3) == 128 + signal.SIGTERM
    stopped = datasvc.open(url).models.restore(name).entry
    assert 3 <= stopped["step"] < NUM_STEPS
    run(framework, url, name, 12)
    found = newest(url, name)
    for part in PARTS[framework]:
        check_equal(found.state[part], whole.state[part], part)
    spans = found.entry["data"][0]["spans"]
    assert [span["step"] for span in spans] == [stopped["step"]]


@pytest.fixture
def lightning_example():
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    spec = spec_from_file_location("lightning_checkpoints", ROOT / "examples/lightning_checkpoints.py")
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.parametrize("several", [False, True])
def test_lightning_saves_with_any_loader_and_goes_on(lightning_example, tmp_path, several):
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Net(lightning_example.SmallNet):
        def training_step(self, batch, index):
            return super().training_step(batch["a"] if several else batch, index)

    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    loader = DataLoader(TensorDataset(torch.rand(24, 3, 8, 8), torch.randint(4, (24,))), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    for number, steps in enumerate((9, 15), 1):
        versions = lightning_example.SaveVersions(repo, "net", every=100)
        plugin = lightning_example.VersionPlugin(repo)
        trainer = lightning.Trainer(
            max_steps=steps, callbacks=[versions], plugins=[plugin], enable_checkpointing=False, **quiet
        )
        trainer.fit(Net(4, 8), {"a": loader} if several else loader, ckpt_path="net@1" if number > 1 else None)
        found = repo.models.restore("net")
        assert (found.version.version, found.entry["step"], found.entry["data"]) == (number, steps, [])
        assert "loader" not in found.state
        assert found.state["optimizer_states"][0]["state"][0]["step"] == steps
    assert found.entry["parent"] == "net@1"

"""The loader and the checkpoints of torchtitan with versions, in this process, on torchtitan's own components."""

from dataclasses import replace
from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import datasvc
from datasvc.errors import ConfigError, NotFoundError

pytestmark = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]
BLOCK = 8


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "source" / "train"
    folder.mkdir(parents=True)
    tokens = [[block * BLOCK + place for place in range(BLOCK)] for block in range(12)]
    pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32(), BLOCK))}), folder / "blocks.parquet")
    url = str(tmp_path / "repo")
    datasvc.open(url, create=True)
    datasvc.ingest(str(folder.parent), "blocks", repo=url)
    return datasvc.open(url)


@pytest.fixture
def config(repo, tmp_path):
    from datasvc.integrations.torchtitan import TitanVersions

    return TitanVersions.Config(enable=True, interval=3, repo=repo.repository.url, name="llama")


@pytest.fixture
def loader(repo):
    from datasvc.integrations.torchtitan import TitanLoader

    def build(rank=0, num_ranks=1, seq_len=BLOCK):
        config = TitanLoader.Config(dataset="blocks@1", dataset_path=repo.repository.url, options={"seed": 1})
        runtime = {"tokenizer": None, "local_batch_size": 2, "snapshot_every_n_steps": None}
        return config.build(dp_rank=rank, dp_world_size=num_ranks, seq_len=seq_len, **runtime)

    return build


def build(config, tmp_path, dataloader=None):
    """Return the versions and the model that torchtitan's `Trainer` would have."""
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    model = torch.nn.Linear(2, 2)
    optimizers = replace(default_adamw(lr=0.1), implementation="for-loop").build(model_parts=[model])
    versions = config.build(
        dataloader=dataloader or Progress(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizers, training_steps=10),
        states={"train_state": Progress()},
        sd_adapter=None,
        base_folder=str(tmp_path / "dump"),
    )
    return versions, model


def train(versions, model, steps):
    """Make saves as `Trainer.train` does; return the weight of each step."""
    weights = {}
    for step in steps:
        torch.nn.init.constant_(model.weight, step)
        versions.states["train_state"].step = step
        versions.maybe_wait_for_staging()
        versions.save(step, last_step=step == steps[-1])
        weights[step] = model.weight.clone()
    versions.close()
    return weights


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_versions_are_saved_at_the_interval_and_loaded_by_their_step(tmp_path, group, repo, config, async_mode):
    """A later step changes the weights while the version of an earlier one is stored in the background."""
    config = replace(config, async_mode=async_mode, enable_first_step_checkpoint=True)
    versions, model = build(config, tmp_path)
    assert not versions.load()
    weights = train(versions, model, range(1, 8))
    assert versions.version == "llama@4"
    entries = [repo.repository.entry(version).content for version in repo.models.versions("llama")]
    assert [(entry["step"], entry["parent"]) for entry in entries] == [
        (1, None), (3, "llama@1"), (6, "llama@2"), (7, "llama@3")
    ]  # fmt: skip
    for step, expected in ((-1, 7), (3, 3)):
        again, other = build(config, tmp_path)
        assert again.load(step)
        assert torch.equal(other.weight, weights[expected])
        assert again.states["train_state"].step == expected
    assert again.version == "llama@2"
    with pytest.raises(NotFoundError, match="no version of step 5; it has versions of the steps 1, 3, 6, 7"):
        again.load(5)
    again.exclude_from_loading = ["nothing"]
    with pytest.raises(ConfigError, match="exclude_from_loading has 'nothing'; the parts are"):
        again.load()


def test_the_settings_of_torchtitan_s_manager_apply(tmp_path, group, repo, config):
    """Old versions are removed, and the last one holds the model alone, in the type of the export."""
    settings = replace(config, keep_latest_k=2, last_save_model_only=True, export_dtype="bfloat16", interval=1)
    versions, model = build(settings, tmp_path)
    train(versions, model, range(1, 6))
    left = [str(version) for version in repo.models.versions("llama")]
    assert left[-1] == "llama@5"
    assert left[0] != "llama@1"
    state = repo.models.restore("llama@5").state
    assert sorted(state) == ["bias", "weight"]
    assert state["weight"].dtype == torch.bfloat16

    # A new model starts from the weights of that version, and from no folder.
    start = replace(config, name="tuned", initial_load_path=f"{repo.repository.url}#llama@5")
    tuned, other = build(start, tmp_path)
    assert tuned.load()
    assert torch.equal(other.weight, torch.full((2, 2), 5.0))
    assert (tuned.version, tuned.states["train_state"].step) == ("llama@5", 0)
    assert tuned.save(3)
    assert repo.repository.entry(repo.repository.newest("models", "tuned")).content["parent"] == "llama@5"

    reading, _ = build(replace(config, load_only=True), tmp_path)
    assert not reading.save(3)
    disabled, _ = build(replace(config, enable=False), tmp_path)
    assert not disabled.load()
    assert not disabled.save(3)


def test_a_run_that_began_in_torchtitan_s_folders_continues_in_versions(tmp_path, group, repo, config):
    from torchtitan.components.checkpointer import CheckpointManager

    before, model = build(CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False), tmp_path)
    weights = train(before, model, range(1, 5))
    versions, other = build(config, tmp_path)
    assert versions.load()
    assert torch.equal(other.weight, weights[4])
    assert versions.states["train_state"].step == 4


def test_the_position_of_the_loader_continues_on_other_data_ranks(tmp_path, group, repo, config, loader):
    """pytorch/torchtitan#279: a resumed run must serve the batches that are left, on fewer data ranks too."""
    first, second = loader(0, 2), loader(1, 2)
    served = []
    batches = [iter(first), iter(second)]
    for _ in range(2):
        for each in batches:
            inputs, labels = next(each)
            assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
            served += [int(block) // BLOCK for block in inputs["input"][:, 0]]
    versions, _ = build(config, tmp_path, first)
    versions.save(3)
    versions.close()
    alone = loader()
    again, _ = build(config, tmp_path, alone)
    assert again.load()
    batch = iter(alone)
    for _ in range(2):
        served += [int(block) // BLOCK for block in next(batch)[0]["input"][:, 0]]
    assert sorted(served) == list(range(12))


def test_wrong_settings_are_refused_with_what_to_set(repo, loader):
    from datasvc.integrations.torchtitan import TitanLoader, TitanVersions

    with pytest.raises(ConfigError, match="seq_len is 9, but the blocks of blocks@1 have 8 tokens"):
        loader(seq_len=9)
    with pytest.raises(ConfigError, match=r"TitanLoader\.Config\(dataset='NAME@VERSION'"):
        TitanLoader.Config().build(dp_rank=0, dp_world_size=1, local_batch_size=1, seq_len=8)
    with pytest.raises(ConfigError, match=r"set checkpoint\.repo, the URL of a repository"):
        TitanVersions.Config(enable=True)

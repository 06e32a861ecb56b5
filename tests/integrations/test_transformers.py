"""The Trainer of transformers in our order and with versions, in this process."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders.torch import Dataset
from datasvc.testing import small_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
NUM_SAMPLES, BATCH, ACCUMULATION = 26, 2, 3
STEPS_OF_EPOCH = 5  # 13 batches in steps of 3, the last step has one batch


class Net(torch.nn.Module):
    """Its loss depends on the sample and on random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 4)

    def forward(self, x, labels):
        scores = torch.nn.functional.dropout(self.layer(x))
        return {"loss": torch.nn.functional.cross_entropy(scores, labels)}


@pytest.fixture
def repo(tmp_path):
    small_dataset(str(tmp_path / "repo"), "pets", samples=NUM_SAMPLES)
    return datasvc.open(str(tmp_path / "repo"))


@pytest.fixture
def train(repo, tmp_path):
    import transformers  # slow to import

    from datasvc.integrations.transformers import OrderedTrainer, VersionsOfTrainer

    class Stop(transformers.TrainerCallback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, args, state, control, **parts):  # noqa: ARG002 - the signature is that of transformers
            control.should_training_stop = state.global_step == self.step

    def train(name, *, stop=None, batch=BATCH, every=100):
        served = []

        def to_inputs(sample):
            served.append(sample["key"])
            number = float(sum(sample["key"].encode()) % 7)
            return {"x": torch.tensor([number]), "labels": sample["label"] % 4}

        split = repo.dataset("pets@1")["train"]
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "output"),
            num_train_epochs=2,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=ACCUMULATION,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        versions = VersionsOfTrainer(repo, name, every=every)
        trainer = OrderedTrainer(
            Net(),
            args,
            train_dataset=Dataset(split, columns=["key", "label"], transform=to_inputs),
            callbacks=[versions, *([] if stop is None else [Stop(stop)])],
        )
        trainer.train(resume_from_checkpoint=versions.fetch(args, tmp_path / "fetched"))
        return served

    return train


@pytest.mark.parametrize("stop", [2, STEPS_OF_EPOCH], ids=["middle", "end of an epoch"])
def test_a_run_that_ends_early_continues_to_the_same_bits(repo, train, stop):
    whole = train("whole")
    parts = [*train("parts", stop=stop), *train("parts")]
    assert parts == whole
    assert Counter(whole) == dict.fromkeys(whole, 2)
    expected, found = repo.models.restore("whole"), repo.models.restore("parts")
    assert found.entry["step"] == expected.entry["step"] == 2 * STEPS_OF_EPOCH
    assert found.entry["parent"] == "parts@1"
    for name, tensor in expected.state["model"].items():
        assert torch.equal(found.state["model"][name], tensor)
    assert torch.equal(found.state["rank_state"][0]["torch"], expected.state["rank_state"][0]["torch"])
    uses = repo.models.trained_on(["parts@2"], keys=sorted(set(whole))).all_uses()
    assert sorted((use.epoch, use.position) for use in uses) == [
        (epoch, position) for epoch in range(2) for position in range(NUM_SAMPLES)
    ]


def test_a_resumed_run_with_another_batch_size_is_refused(train):
    train("net", stop=2)
    with pytest.raises(ConfigError, match=r"net@1 was saved at .* give the data, the seed, the batch size"):
        train("net", batch=1)


def test_a_folder_gets_the_files_of_one_version_and_keeps_no_other(repo, tmp_path):
    import transformers

    from datasvc.integrations.transformers import VersionsOfTrainer

    net, args = Net(), transformers.TrainingArguments(output_dir=str(tmp_path / "output"), report_to="none")
    state = {"model": net.state_dict(), "trainer_state": "{}", "scaler": {"scale": 2.0}}
    versions = VersionsOfTrainer(repo, "net")
    versions.checkpoints.begin(None, step=0)
    for step, content in enumerate((state, state | {"scaler": None}), 1):
        versions.checkpoints.save({name: part for name, part in content.items() if part is not None}, step=step)
    versions.checkpoints.close()
    for ref, has_scaler in (("net@1", True), ("net@2", False)):
        folder = Path(versions.fetch(args, tmp_path / "fetched", ref))
        assert (folder / "scaler.pt").exists() == has_scaler
    (folder / "model.safetensors").touch()  # `Trainer` would read it in place of the version's weights
    with pytest.raises(ConfigError, match=r"has files that fetch did not write: model[.]safetensors; give another"):
        versions.fetch(args, folder)
    assert (folder / "model.safetensors").exists()
    versions.checkpoints.close()


def test_other_data_sets_are_read_as_by_trainer(tmp_path):
    import transformers

    from datasvc.integrations.transformers import OrderedTrainer

    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    data = [{"x": torch.zeros(1), "labels": 0}] * 4
    loader = OrderedTrainer(Net(), args, train_dataset=data).get_train_dataloader()
    assert type(loader) is type(transformers.Trainer(Net(), args, train_dataset=data).get_train_dataloader())

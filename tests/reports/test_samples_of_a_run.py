"""What a run says of single samples: their losses, the batch they were in, and whether an evaluation had them."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, NotFiniteError, NotFoundError
from datasvc.ledger.skipped_steps import parse_skip
from datasvc.loaders import ImageLoader, Mixture, TokenLoader
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.models import ConsumptionTracker
from datasvc.replay.bisect import plan_bisect
from datasvc.testing import small_dataset
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train as run_training
from tests.models.trainings import commit


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """Images 0 to 21 in `train`, of the classes 0, 1 and 2."""
    repo = datasvc.open(str(tmp_path_factory.mktemp("samples") / "repo"), create=True)
    small_dataset(repo, "pets", splits={"train": 22, "val": 4}, classes=3, image_size=8)
    return repo


def number_of(key):
    return float(key[-8:-4])


def train(repo, name, samples, loss_of, *, ranks=1, epochs=1, batch_size=4):
    """Record a loss of each sample on several ranks; returns the reference of the run."""
    with repo.runs.start(name) as log:
        for rank in range(ranks):
            with ImageLoader(
                samples, batch_size=batch_size, training=True, size=8, tail="pad", seed=1,
                columns=("key",), ranks=DataRanks(rank, ranks),
            ) as loader:  # fmt: skip
                repo.runs.record(log.ref, loader)
                for _ in range(epochs):
                    for batch in loader:
                        losses = [loss_of(key) for key in batch.keys]
                        padding = [-1.0] * (len(batch.positions) - len(losses))
                        loader.record(batch, torch.tensor(losses + padding))
        return log.ref


def losses_of(repo, ref, **options):
    return dict(zip(*repo.runs.signal_table(ref, "pets", **options).to_pydict().values(), strict=True))


def test_padding_at_the_end_of_an_epoch_is_no_loss_of_a_sample(repo):
    """pytorch/pytorch#25162: samples that fill the last batch counted twice; 22 samples on 3 ranks in fours."""
    split = repo.dataset("pets")["train"]
    losses = losses_of(repo, train(repo, "padded", split, number_of, ranks=3, epochs=2))
    assert losses == {each["key"]: number_of(each["key"]) for each in split}


def test_a_sample_whose_loss_is_not_a_number_is_found(repo):
    """keras-team/keras#6921: "I would like to look at the batch that has provoked the nan loss"."""
    split = repo.dataset("pets")["train"]
    values = {7: math.nan, 9: math.inf}
    run = train(repo, "diverged", split.where("label < 2"), lambda key: values.get(number_of(key), 1.0))
    losses = losses_of(repo, run)
    assert [number_of(key) for key, loss in losses.items() if math.isnan(loss)] == [7]
    assert [number_of(key) for key, loss in losses.items() if math.isinf(loss)] == [9]
    version = repo.datasets.columns.add("pets", "loss", repo.runs.signal_table(run, "pets")).version
    found = repo.datasets.sql(str(version), "select key from train where isnan(loss)")
    assert [number_of(key) for key in found["key"].to_pylist()] == [7]
    assert len(repo.datasets.sql(str(version), "select key from train where loss is null")) == 7  # never read
    repo.datasets.columns.drop("pets", "loss")


def test_a_run_that_ends_at_a_loss_that_is_not_finite_keeps_the_losses_of_that_step(repo):
    """The neighbour of the fault above: the losses since the last save were lost with the run."""
    settings = {"data": "pets@1", "size": 16, "batch_size": 4, "epochs": 2, "report_every": 1, "signals": "loss"}
    config = TrainConfig(repo=repo.repository.url, name="nan", learning_rate=1e30, stop_on_nan=True, **settings)
    with pytest.raises(NotFiniteError, match="saved no version"):
        run_training(config)
    losses = list(losses_of(repo, "nan").values())
    assert len(losses) == 8
    assert any(map(math.isnan, losses))


def test_a_step_that_was_skipped_is_no_step_to_search(repo):
    """marin-community/levanter#391: a bad batch is written down and skipped; its loss is 0, far from the others."""
    settings = {"data": "pets@1", "size": 16, "batch_size": 4, "max_steps": 4, "report_every": 1, "skip": "3"}
    run_training(TrainConfig(repo=repo.repository.url, name="skips", **settings))
    with pytest.raises(ConfigError, match="has skipped step 3"):
        plan_bisect(repo.repository, "skips", 3)
    assert len(plan_bisect(repo.repository, "skips", 4).batch.keys) == 4


def test_a_sample_in_two_parts_of_a_mixture_has_one_loss(repo):
    """rungalileo/dataquality#660: ids that come twice; here, overlapping views gave a key twice, so no column."""
    split = repo.dataset("pets@1")["train"]
    mixture = Mixture({split.where("label in (0, 1)"): 1, split.where("label in (1, 2)"): 1}, epoch_samples=60)
    seen = {}

    def loss_of(key):
        seen.setdefault(key, []).append(float(sum(map(len, seen.values()))))
        return seen[key][-1]

    run = train(repo, "mixed", mixture, loss_of)
    assert max(map(len, seen.values())) > 2
    assert losses_of(repo, run) == {key: values[-1] for key, values in seen.items()}
    assert losses_of(repo, run, reduce="max") == {key: max(values) for key, values in seen.items()}
    assert losses_of(repo, run, reduce="mean") == pytest.approx({key: np.mean(each) for key, each in seen.items()})
    with pytest.raises(NotFoundError, match=r"did not read pets@1/train, but pets@1/train\[.*signal_table"):
        repo.runs.signal(run, split)


def test_the_samples_of_a_batch_are_named_and_can_be_read_again(repo):
    """ecmwf/WeatherGenerator#311: which samples were in the batch at which the training broke."""
    view = repo.dataset("pets@1")["train"].where("label = 1").weighted(weights={"class1": 2})
    with ImageLoader(view, batch_size=4, training=True, size=8, tail="pad") as loader:
        for batch in loader:
            for index, key in enumerate(batch.keys):
                stored = batch.sample(index)
                assert (stored["key"], stored["label"]) == (key, int(batch.labels[index])) == (key, 1)


def evaluate(repo, name, loader, **options):
    """Train on all samples of a loader, and return what of the evaluation it was trained on."""
    tracker = ConsumptionTracker(loader)
    for _ in loader:
        pass
    loader.close()
    return repo.models.find_evaluated(commit(repo.repository, name, 1, [tracker.use()]), **options)


def test_texts_of_an_evaluation_that_were_in_the_training_are_found(repo, tmp_path):
    """bigscience-workshop/data_tooling#48, embeddings-benchmark/mteb#1036: exact copies, under other keys."""
    for split, first in (("train", 0), ("val", 5)):
        (tmp_path / split).mkdir()
        tokens = pa.array([[number, 1, 2, 3] for number in range(first, first + 8)], pa.list_(pa.int32(), 4))
        keys = [f"{split}{number}" for number in range(first, first + 8)]
        pq.write_table(pa.table({"key": keys, "tokens": tokens}), tmp_path / split / "a.parquet")
    repo.datasets.ingest(str(tmp_path), "texts")
    train_split = repo.dataset("texts")["train"]
    found = evaluate(repo, "reader", TokenLoader(train_split, batch_size=4, training=True))
    expected = [(f"val{number}", f"train{number}", True) for number in (5, 6, 7)]
    assert sorted((each.key, each.trained_key, each.is_consumed) for each in found.samples) == expected
    found = evaluate(
        repo, "part", TokenLoader(train_split.where("tokens[1] < 6"), batch_size=2, training=True),
        data="texts[tokens[1] >= 5]",
    )  # fmt: skip
    assert [(each.key, each.trained_key) for each in found.samples] == [("val5", "train5")]
    assert list(found.evaluated.values()) == [8]


def test_images_of_an_evaluation_are_compared_by_their_bytes(repo, tmp_path):
    """tqwei05/PlantSeg#11, zalandoresearch/fashion-mnist#44: equal images in both splits, under other names."""
    split = repo.dataset("pets@1")["train"]
    (tmp_path / "cats").mkdir()
    for number in (3, 4):
        (tmp_path / "cats" / f"copy{number}.jpg").write_bytes(split[number]["image"])
    repo.datasets.ingest(str(tmp_path), "others")
    loader = ImageLoader(split, batch_size=11, training=True, size=8)
    found = evaluate(repo, "seer", loader, data="others", split="train")
    expected = sorted((f"cats/copy{number}.jpg", split[number]["key"]) for number in (3, 4))
    assert sorted((each.key, each.trained_key) for each in found.samples) == expected


@pytest.mark.parametrize("text", ["9" * 5000, f"1:{'9' * 5000}", "\N{FULLWIDTH DIGIT THREE}", "1-", "5-3", "0"])
def test_steps_to_skip_are_numbers_of_steps(text):
    """bigscience-workshop/Megatron-DeepSpeed#175: ranges of steps to skip, as people may write them."""
    with pytest.raises(ConfigError, match=r"^skip is "):
        parse_skip(text)

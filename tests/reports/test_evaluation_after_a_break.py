"""Evaluations whose loops are left early: the next loop reads the same samples again, from the first on."""

from functools import partial
from importlib.util import find_spec
from itertools import islice

import numpy as np
import pytest
import torch
import torch.utils.data

import datasvc
from datasvc.loaders import ImageLoader, Mixture, TokenLoader
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler, ResumableDataLoader
from datasvc.testing import small_dataset
from tests.loaders.tokens.test_token_loader import schema_of, write_split

SAMPLES, BATCH = 18, 4
BATCHES = 5


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("evaluation") / "repo")
    small_dataset(url, "pets", samples=SAMPLES)
    return datasvc.open(url)


@pytest.fixture(scope="module")
def split(repo):
    return repo.dataset("pets@1")["train"]


def positions_of(batch):
    """Return the positions of a batch's samples; those of padding are left out."""
    if isinstance(batch, dict):
        return batch["number"].tolist()
    return batch.positions[np.asarray(batch.mask)].tolist()


def first_of(batches, count=None):
    return [positions_of(batch) for batch in islice(batches, count)]


def numbered(sample, numbers):
    return {"number": numbers[sample["key"]]}


def make_torch(split, kind, training):
    numbers = {key: number for number, key in enumerate(split.to_arrow(["key"])["key"].to_pylist())}
    dataset = Dataset(split, columns=["key"], transform=partial(numbered, numbers=numbers))
    order = OrderBatchSampler(dataset, batch_size=BATCH, shuffle=None, tail="short", training=training)
    return ResumableDataLoader(IterableDataset(dataset, order)) if kind else ResumableDataLoader(dataset, order)


def make_loader(split, kind, *, training=False):
    images = partial(ImageLoader, batch_size=BATCH, training=training, size=8, shuffle=None, tail="pad")
    if kind == "mixture":
        return images(Mixture({split: 1}))
    if kind == "tokens":
        blocks = [{"tokens": [number] * 8} for number in range(SAMPLES)]
        tokens = write_split(split.repository, blocks, schema_of())
        return TokenLoader(tokens, batch_size=BATCH, training=training, shuffle=None, tail="pad")
    if kind.startswith("torch"):
        return make_torch(split, kind == "torch-iterable", training)
    return images(split)


KINDS = ["images", "mixture", "tokens", "torch-map", "torch-iterable"]
WHOLE = [list(range(start, min(start + BATCH, SAMPLES))) for start in range(0, SAMPLES, BATCH)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_after_a_peek_or_a_limit_begins_at_the_first_sample(split, kind):
    """davidtvs/pytorch-lr-finder#59: a validation loader goes on where the last, unfinished validation ended."""
    loader = make_loader(split, kind)
    assert len(loader) == BATCHES
    assert first_of(loader, 1) == WHOLE[:1]  # `next(iter(loader))`
    assert [first_of(loader, 2) for _ in range(3)] == [WHOLE[:2]] * 3  # limit_val_batches=2
    assert first_of(loader) == WHOLE
    assert first_of(loader, BATCHES) == WHOLE  # left at the last batch
    assert first_of(loader) == WHOLE
    held = iter(loader)  # a loop whose iterator is kept
    assert positions_of(next(held)) == WHOLE[0]
    assert first_of(loader) == WHOLE


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_inside_of_one_another_each_read_all_samples(split, kind):
    """meta-pytorch/data#1439: two iterators of one loader share its position."""
    loader = make_loader(split, kind)
    pairs = [(positions_of(one), positions_of(other)) for one, other in zip(loader, loader, strict=True)]
    assert pairs == list(zip(WHOLE, WHOLE, strict=True))
    assert [(positions_of(batch), first_of(loader)) for batch in loader] == [(part, WHOLE) for part in WHOLE]
    assert first_of(loader) == WHOLE


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_counts_for_one_evaluation(split, kind):
    """huggingface/datasets#7447: after a resume, every later epoch has only the rest of the samples."""
    loader = make_loader(split, kind)
    first_of(loader, 2)
    state = loader.state_dict()
    other = make_loader(split, kind)
    other.load_state_dict(state)
    assert first_of(other) == WHOLE[2:]
    assert [first_of(other) for _ in range(2)] == [WHOLE] * 2
    other.load_state_dict(state)
    assert [first_of(other, 1), first_of(other, 1)] == [WHOLE[2:3], WHOLE[:1]]


def test_a_state_that_is_loaded_inside_of_an_evaluation_moves_it(split):
    """meta-pytorch/data#1437: a state that is loaded while an iterator exists is lost."""
    loader = make_loader(split, "images")
    first_of(loader, 3)
    state, seen = loader.state_dict(), []
    for batch in loader:
        seen.append(positions_of(batch))
        if len(seen) == 1:
            loader.load_state_dict(state)
    assert seen == WHOLE[:1] + WHOLE[3:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_after_a_break_goes_on_where_it_was_left(split, kind):
    loader = make_loader(split, kind, training=True)
    assert first_of(loader, 2) + first_of(loader, 1) + first_of(loader) == WHOLE


def test_an_evaluation_may_change_between_arrays_and_tensors(split):
    loader = make_loader(split, "images")
    assert first_of(loader.numpy(), 2) == first_of(loader, 2) == WHOLE[:2]
    arrays, tensors = loader.numpy(), iter(loader)
    found = [(positions_of(next(arrays)), positions_of(next(tensors))) for _ in range(3)]
    assert found == [(part, part) for part in WHOLE[:3]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize(("limit", "expected"), [(1.0, WHOLE), (3, WHOLE[:3])])
def test_each_validation_of_lightning_sees_the_same_samples(repo, limit, expected):
    """uber/petastorm#610: the sanity check of Lightning has left a reader in the middle of its samples."""
    from tests.integrations.lightning_net import Net, SplitsModule, trainer

    class Watched(Net):
        def validation_step(self, batch, index):
            if index == 0:
                self.seen.append([])
            self.seen[-1].append(positions_of(batch))

    version = repo.dataset("pets@1")
    data = SplitsModule(version, partial(ImageLoader, batch_size=BATCH, size=8), val="train")
    net = Watched()
    net.seen = []
    run = trainer(8, enable_checkpointing=False, limit_val_batches=limit, val_check_interval=2, limit_train_batches=4)
    run.fit(net, data)
    run.validate(net, data, verbose=False)
    assert len(net.seen) == 1 + 4 + 1  # the sanity check, four validations of the fit, and one of its own
    assert net.seen[0] == WHOLE[:2]
    assert net.seen[1:] == [expected] * 5


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_each_validation_of_accelerate_sees_the_same_samples(split):
    """kyutai-labs/moshi-finetune#13: each evaluation after the first one finds an iterator that was read before."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, loader = accelerator.prepare(torch.nn.Linear(3 * 8 * 8, 4), make_loader(split, "images"))
    with torch.no_grad():
        results = [sum(model(batch.images.flatten(1)).sum() for batch in islice(loader, 2)) for _ in range(3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_each_evaluation_of_transformers_sees_the_same_samples(split, tmp_path):
    """huggingface/transformers#28469: a trainer may keep the loader of its evaluations, and loop over it again."""
    import transformers

    from datasvc.integrations.transformers import OrderedTrainer

    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, number, **_):
            if not self.training:
                seen[-1] += number.flatten().tolist()
            return {"loss": self.layer(number.float().view(-1, 1)).mean()}

    class Watched(OrderedTrainer):
        def evaluate(self, *args, **more):
            seen.append([])
            return super().evaluate(*args, **more)

        def get_eval_dataloader(self, eval_dataset=None):  # noqa: ARG002 - the signature is that of Trainer
            return loader

    loader = make_torch(split, False, False)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
    )
    next(iter(loader))  # a user looks at the data first
    Watched(Net(), args, train_dataset=loader.dataset, eval_dataset=loader.dataset).train()
    assert seen == [list(range(SAMPLES))] * 4


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")
def test_each_evaluation_of_keras_sees_the_same_samples(split, monkeypatch):
    """keras-team/keras#9537: with `validation_steps`, the validations of two epochs are over different samples."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras

    from datasvc.integrations.keras import LoaderBatches

    seen = []

    def to_inputs(batch):
        seen.append(positions_of(batch))
        return batch.images, batch.labels % 4

    model = keras.Sequential([keras.Input((3, 8, 8)), keras.layers.Flatten(), keras.layers.Dense(4)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    loader = make_loader(split, "images")
    next(iter(loader))
    batches = LoaderBatches(loader, transform=to_inputs)
    model.evaluate(batches, verbose=0)
    assert seen == WHOLE[:1] + WHOLE  # Keras takes one batch to build the model
    for _ in range(2):
        seen.clear()
        model.evaluate(batches, steps=2, verbose=0)
        assert seen[:2] == WHOLE[:2]
    training = LoaderBatches(
        make_loader(split, "images", training=True), transform=lambda b: (b.images, b.labels % 4)
    )
    seen.clear()
    model.fit(training, epochs=2, validation_data=batches, verbose=0)
    assert seen == WHOLE * 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")
@pytest.mark.parametrize("steps", [None, 2, 1])
def test_each_epoch_of_keras_without_our_callback_continues_after_the_last_one(split, monkeypatch, steps):
    """tensorflow/tensorflow#35982: what Keras has taken from a generator is not what it has trained on."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras

    from datasvc.integrations.keras import LoaderBatches

    seen = []

    def to_inputs(batch):
        seen.append((batch.epoch, int(batch.positions[0])))
        return batch.images, batch.labels % 4

    model = keras.Sequential([keras.Input((3, 8, 8)), keras.layers.Flatten(), keras.layers.Dense(4)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    loader = ImageLoader(split, batch_size=BATCH, training=True, size=8)
    model.fit(LoaderBatches(loader, transform=to_inputs), epochs=3, steps_per_epoch=steps, verbose=0)
    # Keras takes one batch to build the model.
    steps = [(epoch, start) for epoch in range(3) for start in range(0, 16, BATCH)][: steps and 3 * steps]
    assert seen == [(0, 0), *steps]

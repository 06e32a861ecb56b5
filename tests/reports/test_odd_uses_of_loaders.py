"""What people do with a loader that they would do with torch's `DataLoader`."""

import copy
import multiprocessing
import pickle
from importlib.util import find_spec

import pytest
import torch
import torch.utils.data
from torch.utils import _pytree

import datasvc
from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader, Mixture, TokenLoader
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler, ResumableDataLoader
from datasvc.testing import small_dataset
from tests.loaders.tokens.test_token_loader import schema_of, write_split


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("uses") / "repo")
    small_dataset(url, "pets", samples=12)
    return datasvc.open(url)


@pytest.fixture
def loader(repo):
    with ImageLoader(repo.dataset("pets@1")["train"], batch_size=4, training=True, size=8, columns=["key"]) as loader:
        yield loader


LOADERS = {
    "images": lambda data: ImageLoader(data, batch_size=4, training=True),
    "tokens": lambda data: TokenLoader(data, batch_size=4, training=True),
    "dataset": Dataset,
    "sampler": lambda data: OrderBatchSampler(data, batch_size=4),
    "mixture": lambda data: Mixture([(data, 1)]),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_what_is_no_split_is_named_with_the_way_to_one(repo, make):
    """TIGER-AI-Lab/VLM2Vec#82: a dict of splits is given where one split is needed, and the error has a key 0."""
    version = repo.dataset("pets@1")
    for wrong, message in (
        (version, r"pets@1 is a version of a data set: give a split of it, version\['train'\]"),
        ("pets@1", r"'pets@1' is a text: give a split, datasvc\.open"),
        (version["train"][:2], "a list of samples is not a split: give the split itself"),
        (repo, "DataRepository is not a split"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(wrong)


def test_a_loader_that_is_copied_or_sent_to_a_process_says_what_to_do(loader):
    """pytorch/pytorch#51836: what has a lock in it ends in an error of pickle, which names no way out."""
    process = multiprocessing.get_context("spawn").Process(target=len, args=(loader,))
    for use in (pickle.dumps, copy.copy, copy.deepcopy, lambda _: process.start()):
        with pytest.raises(ConfigError, match=r"this ImageLoader has threads .*: create one there"):
            use(loader)
    assert len(next(iter(loader)).positions) == 4


def test_a_loader_in_a_loader_says_that_it_makes_batches_itself(loader):
    for batch_size in (1, None):
        with pytest.raises(ConfigError, match=r"makes batches .*: iterate over it, without a DataLoader"):
            next(iter(torch.utils.data.DataLoader(loader, batch_size=batch_size)))


def test_a_batch_size_that_a_search_sets_is_refused(loader):
    """Lightning-AI/pytorch-lightning#2523, #3259: a search sets the attribute `batch_size`, and no batch changes."""
    with pytest.raises(ConfigError, match="create another loader with batch_size=8"):
        loader.batch_size = 8
    with pytest.raises(ConfigError, match="batch_size is '8'; expected an integer"):
        ImageLoader(loader.split, batch_size="8", training=True)


def test_what_is_shown_of_data_and_checkpoints_is_one_line(repo, loader, tmp_path):
    """dmarx/Multi-Modal-Comparators#8: a list of loaders is shown as a list of addresses."""
    split = loader.split
    batches = OrderBatchSampler(split, batch_size=4)
    repo.models.save("net", {"model": torch.nn.Linear(100, 100).state_dict(), "epoch": 3}, step=7)
    with Cache(tmp_path / "cache", budget="10MB") as cache:
        shown = {
            "ImageLoader(Split(pets@1/train, 12 samples), batch_size=4, training=True, data rank 0 of 1, ": loader,
            "ImageBatch(images [4, 3, 8, 8], labels [4], mask [4], positions [4], windows [4, 4], flips [4])": next(
                iter(loader)
            ),
            "OrderBatchSampler(Split(pets@1/train, 12 samples), batch_size=4": batches,
            "ResumableDataLoader(Split(pets@1/train": ResumableDataLoader(Dataset(split), batches),
            "IterableDataset(Split(pets@1/train": IterableDataset(Dataset(split), batches),
            f"Cache('{tmp_path / 'cache'}'": cache,
            "Checkpoint(net@1, step 7, state: model, epoch)": repo.models.restore("net"),
            "[{'key': ": split[:2],
        }
        for start, value in shown.items():
            text = repr(value)
            assert text.startswith(start)
            assert "\n" not in text
            assert len(text) < 300
    assert "'image': <" in repr(split[0])


def test_batches_are_trees_of_their_tensors(repo, loader):
    """Lightning-AI/pytorch-lightning#7878: what is no tuple or dict is not moved to the device."""
    tokens = write_split(repo.repository, [{"tokens": [number] * 8} for number in range(8)], schema_of())
    for batch in (next(iter(loader)), next(iter(TokenLoader(tokens, batch_size=4, training=True)))):
        leaves, structure = _pytree.tree_flatten(batch)
        assert len(leaves) >= 3
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        doubled = _pytree.tree_map(lambda tensor: tensor * 2 if tensor.dtype != torch.bool else tensor, batch)
        assert torch.equal(doubled[0], batch[0] * 2)
        assert type(doubled) is type(batch)
        assert doubled.positions is batch.positions
        assert doubled.epoch == batch.epoch
        assert _pytree.tree_structure(doubled) == structure
    assert _pytree.tree_map(lambda tensor: tensor, next(iter(loader))).columns["key"]


def test_columns_of_numbers_are_leaves_too(repo):
    with ImageLoader(
        repo.dataset("pets@1")["train"], batch_size=4, training=True, size=8, columns=["width"]
    ) as loader:
        batch = next(iter(loader))
    moved = _pytree.tree_map(lambda tensor: tensor.to(torch.float64), batch)
    assert moved.columns["width"].dtype == torch.float64
    assert torch.equal(moved.columns["width"], batch.columns["width"].double())
    assert batch.columns["width"].dtype != torch.float64


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_search_for_the_batch_size_of_transformers_reaches_the_loader(repo, tmp_path):
    """huggingface/accelerate#1934: no batch size is found, since the loader has the first one in each attempt."""
    import transformers

    from datasvc.integrations.transformers import OrderedTrainer

    sizes = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, labels):
            sizes.append(len(labels))
            if len(labels) > 4:
                raise RuntimeError("CUDA out of memory.")
            return {"loss": self.layer(labels.float().unsqueeze(1)).mean()}

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=8,
        auto_find_batch_size=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    OrderedTrainer(Net(), args, train_dataset=Dataset(repo.dataset("pets@1")["train"], columns=["label"])).train()
    assert sizes[0] == 8
    assert sizes[-2:] == [4, 4]

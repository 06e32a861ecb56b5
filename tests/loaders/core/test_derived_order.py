"""`shuffle="windowed"` alone: lanes and block for the data and the cache, kept by the state, equal on all ranks."""

import json
import logging
from itertools import chain

import pytest
import torch.distributed

from datasvc.cache import Cache
from datasvc.errors import CacheFullError, ConfigError, StateMismatchError
from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader, Mixture
from datasvc.loaders.core import derived_order
from datasvc.loaders.core.derived_order import window_need
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.torch import IterableDataset, OrderBatchSampler, ResumableDataLoader
from datasvc.loaders.torch.dataset import Dataset
from datasvc.order import OrderConfig
from datasvc.trainer.rendezvous.rendezvous import RoundStore
from tests.loaders.echo import _Echo
from tests.loaders.numbered import write_split

BLOCK = 4096
WINDOWED = {"shuffle": "windowed", "seed": 3}


class Windowed(Loader):
    """A loader of `shuffle="windowed"` alone, whose batches are `SampleBatch`es."""

    def __init__(self, samples, **options):
        super().__init__(
            samples, blob=None, columns=("label",), training=True, **{"batch_size": 4, **WINDOWED, **options}
        )

    def _make_decoder(self):
        return _Echo()


@pytest.fixture
def numbers(repository):
    """40 shards of 10 samples, each a block of the disk."""
    return write_split(repository, "numbers", [10] * 40, 0)


def labels(batches):
    return [batch.columns["label"].tolist() for batch in batches]


def test_an_epoch_serves_each_sample_once_in_a_window_of_the_shards(numbers):
    with Windowed(numbers) as loader:
        assert loader.order.shuffle == "windowed"
        needed = window_need(numbers)(loader.order, loader._batches_at_once)
        assert 2 * BLOCK < needed <= 40 * BLOCK / 4
        served = list(chain(*labels(loader)))
    assert sorted(served) == list(range(400))
    assert served != list(range(400))


def test_the_numbers_follow_the_budget_of_the_cache(numbers, tmp_path):
    found = []
    for num_shards in (4, 12, 40):
        with Cache(tmp_path / "cache", budget=num_shards * BLOCK) as cache, Windowed(numbers, cache=cache) as loader:
            found.append(loader.order.lanes * loader.order.block)
            assert sorted(chain(*labels(loader))) == list(range(400))
    assert found == sorted(set(found))
    with (
        Cache(tmp_path / "cache", budget=BLOCK) as cache,
        pytest.raises(CacheFullError, match=r"1 lane x .* of 1 sample,.*ingest smaller shards"),
    ):
        Windowed(numbers, cache=cache)


def test_a_resumed_run_takes_the_numbers_of_its_state_whatever_the_budget_is(numbers, tmp_path):
    with Cache(tmp_path / "cache", budget=40 * BLOCK) as cache, Windowed(numbers, cache=cache) as loader:
        whole = labels(loader) + labels(loader)
        large = loader.order
    with Cache(tmp_path / "cache", budget=40 * BLOCK) as cache, Windowed(numbers, cache=cache) as loader:
        found = labels(batch for _, batch in zip(range(7), loader, strict=False))
        state = json.loads(json.dumps(loader.state_dict()))
    assert (state["lanes"], state["block"]) == (large.lanes, large.block)
    with Cache(tmp_path / "other", budget=30 * BLOCK) as cache, Windowed(numbers, cache=cache, prefetch=0) as loader:
        assert loader.order != large
        with pytest.raises(CacheFullError, match="needs"):
            loader.load_state_dict(state)
        assert loader.order != large
        assert sorted(chain(*labels(loader))) == list(range(400))
    with Windowed(numbers) as loader:
        assert loader.order != large
        next(iter(loader))
        loader.load_state_dict(state)
        assert loader.order == large
        assert loader.state_dict() == state
        assert found + labels(loader) + labels(loader) == whole


def test_numbers_that_were_given_are_not_replaced_and_another_seed_is_refused(numbers):
    with Windowed(numbers) as loader:
        state = loader.state_dict()
    given = OrderConfig(3, "windowed", 1, 5)
    with pytest.raises(StateMismatchError, match="use the saved parameters"):
        Windowed(numbers, order=given, seed=None, shuffle="auto").load_state_dict(state)
    with pytest.raises(StateMismatchError, match="seed"):
        Windowed(numbers, seed=4).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed is -1"):
        Windowed(numbers, seed=-1)


def test_a_mixture_derives_one_order_for_its_splits_and_its_state_keeps_it(repository, tmp_path):
    splits = [write_split(repository, name, [10] * 30, 1000 * number) for number, name in enumerate("ab")]
    mixture = Mixture([(splits[0], 2), (splits[1], 1)], block=30)
    with Cache(tmp_path / "cache", budget=60 * BLOCK) as cache, Windowed(mixture, cache=cache) as loader:
        found, state = labels(loader), loader.state_dict() | {"epoch": 0, "position": 0}
    with Windowed(mixture) as loader:
        assert loader.order.block != state["block"] or loader.order.lanes != state["lanes"]
        loader.load_state_dict(state)
        assert labels(loader) == found


def test_a_loop_in_which_a_state_of_another_order_is_loaded_does_not_go_on_without_its_ledger(numbers, tmp_path):
    with Cache(tmp_path / "cache", budget=40 * BLOCK) as cache, Windowed(numbers, cache=cache) as loader:
        state = loader.state_dict()
    with Windowed(numbers, ledger=tmp_path / "ledger") as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="is the ledger of"):
            next(batches)


def test_the_ledger_of_a_resumed_run_is_that_of_the_state(numbers, tmp_path):
    with Cache(tmp_path / "cache", budget=40 * BLOCK) as cache:
        loader = Windowed(numbers, cache=cache, ledger=tmp_path / "ledger")
        with loader:
            next(iter(loader))
            state = loader.state_dict()
    with Windowed(numbers, ledger=tmp_path / "ledger") as loader:
        loader.load_state_dict(state)
        assert len(labels(loader)) == 99
    assert len(list((tmp_path / "ledger").iterdir())) == 2
    with (
        Windowed(numbers, ledger=tmp_path / "ledger") as loader,
        pytest.raises(ConfigError, match="is the ledger of"),
    ):
        next(iter(loader))


def test_all_ranks_take_the_numbers_of_data_rank_0(numbers, tmp_path):
    store, orders = torch.distributed.HashStore(), []
    for rank, num_shards in ((0, 12), (1, 40)):
        with Cache(tmp_path / str(rank), budget=num_shards * BLOCK) as cache:
            batches = derived_order.BatchesAtOnce(4, 2)
            options = {"seed": 0, "find_store": lambda: store}
            orders.append(derived_order.derive_windowed(numbers, cache, DataRanks(rank, 2), batches, **options))
    assert orders[0] == orders[1]


def test_where_data_rank_0_cannot_open_its_cache_all_ranks_say_so(numbers, tmp_path):
    answers, batches = torch.distributed.HashStore(), derived_order.BatchesAtOnce(4, 2)
    answers.set("broken", "no answer")  # so a wait for one fails at once
    store = RoundStore(answers, prefix="round", broken_key="broken", timeout_s=60)
    Cache(tmp_path / "1", budget=40 * BLOCK).close()
    for rank, said in ((0, "has no budget yet"), (1, "data rank 0 could not choose: .*/0 has no budget yet")):
        with pytest.raises(ConfigError, match=said):
            derived_order.derive_windowed(
                numbers, tmp_path / str(rank), DataRanks(rank, 2), batches, seed=0, find_store=lambda: store
            )


def test_ranks_without_a_process_group_are_warned_that_budgets_must_be_equal(numbers, tmp_path, caplog):
    with Cache(tmp_path / "cache", budget=40 * BLOCK) as cache, caplog.at_level(logging.WARNING):
        Windowed(numbers, cache=cache, ranks=DataRanks(0, 2)).close()
    assert "give all nodes the same budget" in caplog.text


def test_an_image_loader_with_a_decode_group_takes_the_numbers_of_its_state(digits, tmp_path):
    options = {
        "batch_size": 32,
        "training": True,
        "size": 32,
        "decode": DecodeConfig("cpu", num_threads=1),
        **WINDOWED,
    }
    needed = sum(-(-size // BLOCK) * BLOCK for size in digits["train"].table.bytes_per_shard.tolist())
    with (
        Cache(tmp_path / "cache", budget=needed) as cache,
        ImageLoader(digits["train"], cache=cache, **options) as loader,
    ):
        state = loader.state_dict()
        expected = [batch.labels.tolist() for batch in loader]
    with ImageLoader(digits["train"], decode_group=f"derived-{tmp_path.name}", **options) as loader:
        before = loader.sharing
        assert loader.state_dict() != state
        loader.load_state_dict(state)
        assert loader.sharing is not before
        assert [batch.labels.tolist() for batch in loader] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loaders_take_the_numbers_of_a_state_also_in_persistent_workers(numbers, tmp_path, num_workers):
    with Cache(tmp_path / "cache", budget=40 * BLOCK) as cache, Windowed(numbers, cache=cache) as loader:
        next(iter(loader))
        state = loader.state_dict()
        expected = labels(loader)
    dataset = Dataset(numbers, columns=("label",))
    samples = IterableDataset(dataset, OrderBatchSampler(dataset, batch_size=4, **WINDOWED))
    derived = samples.order.config
    again = ResumableDataLoader(samples, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert sum(len(batch["label"]) for batch in again) == 400
    again.load_state_dict(state)
    assert samples.order.config != derived
    assert [batch["label"].tolist() for batch in again] == expected

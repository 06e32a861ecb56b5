"""The space that a loader's order needs in the cache: what is accepted runs, and what is refused says why."""

import pytest

from datasvc.cache import Cache
from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import CacheFullError
from datasvc.loaders import Mixture
from datasvc.loaders.core import derived_order
from datasvc.order import OrderConfig
from tests.loaders.echo import EchoLoader
from tests.loaders.numbered import write_split

SIZES = [9, 4, 11, 2, 14, 9, 9, 9, 9, 1] * 4 + [1]
ORDERS = [
    OrderConfig(shuffle=None),
    OrderConfig(1, "windowed", 1, 4),
    OrderConfig(2, "windowed", 2, 7),
    OrderConfig(3, "windowed", 3, 1, sticky=True),
]


def needed_by(samples, order, batches):
    return derived_order.window_need(samples)(order, batches)


@pytest.fixture
def numbers(repository):
    return write_split(repository, "numbers", SIZES, 0)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_budget_of_exactly_the_window_is_enough_for_several_epochs(numbers, tmp_path, order, tail, prefetch):
    budget = needed_by(numbers, order, BatchesAtOnce(4, 1, prefetch, tail))
    assert budget < needed_by(numbers, OrderConfig(), BatchesAtOnce(4))
    options = {"batch_size": 4, "order": order, "tail": tail, "prefetch": prefetch}
    with Cache(tmp_path / "cache", budget=budget) as cache, EchoLoader(numbers, cache=cache, **options) as loader:
        for _ in range(2):
            served = [position for batch in loader for position in batch.positions[batch.mask].tolist()]
            assert sorted(served) == list(range(308 if tail == "drop" else 309))
    with (
        Cache(tmp_path / "cache", budget=budget - 1) as cache,
        pytest.raises(CacheFullError, match=f"needs {budget} bytes .* {1 + prefetch} batch"),
    ):
        EchoLoader(numbers, cache=cache, **options)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_ranks_that_are_a_step_apart_fit_the_window_together(numbers, tmp_path, order):
    budget = needed_by(numbers, order, BatchesAtOnce(2, 2, 1))
    with Cache(tmp_path / "cache", budget=budget) as cache:
        ranks = [
            EchoLoader(numbers, batch_size=2, rank=rank, world_size=2, order=order, cache=cache) for rank in range(2)
        ]
        for _ in range(3):
            ahead, behind = map(iter, ranks)
            next(ahead)
            for _ in behind:
                next(ahead, None)
        for loader in ranks:
            loader.close()


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_the_windows_of_a_mixture_are_enough_for_several_epochs(repository, tmp_path, tail):
    splits = [write_split(repository, name, sizes, 0) for name, sizes in (("a", SIZES), ("b", [5] * 9))]
    mixture, order = Mixture(list(zip(splits, (3, 1), strict=True)), block=8, epoch_samples=30), ORDERS[1]
    budget = needed_by(mixture, order, BatchesAtOnce(4, 1, 1, tail))
    with (
        Cache(tmp_path / "cache", budget=budget) as cache,
        EchoLoader(mixture, batch_size=4, order=order, tail=tail, cache=cache) as loader,
    ):
        assert sum(1 for _ in range(6) for batch in loader) == 6 * len(loader)

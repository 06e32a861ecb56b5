"""Values of a signal by sample: equal to what a hook in the loop saw, for splits and mixtures, of any ranks."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError, NotFoundError
from datasvc.loaders import DataRanks, Mixture, OrderConfig, TokenLoader
from datasvc.runs.run_folders import new_run_id

WINDOWED = OrderConfig(seed=5, shuffle="windowed", lanes=2, block=8)


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """Two data sets whose samples hold their number; of one, some are deleted."""
    folder = tmp_path_factory.mktemp("signals")
    repo = datasvc.open(str(folder / "repo"), create=True)
    for name, first in (("a", 0), ("b", 1000)):
        blocks = first + np.repeat(np.arange(70)[:, None], 4, axis=1)
        (folder / name).mkdir()
        column = pa.array(blocks.tolist(), pa.list_(pa.int32(), 4))
        pq.write_table(pa.table({"tokens": column}), folder / name / "blocks.parquet")
        repo.datasets.ingest(str(folder / name), name, shard_bytes=400)
    keys = [sample["key"] for sample in repo.dataset("a")["train"]]
    repo.datasets.delete("a", keys=[keys[number] for number in (0, 13, 69)])
    return repo


def start_run(repo):
    run = f"lm/{new_run_id()}"
    repo.repository.storage.create(f"runs/{run}/00000001.json", b"{}")
    return run


def record(repo, run, samples, *, num_ranks, num_epochs, order):
    """Record a random number for each sample and epoch; return them in training order, by number of the sample."""
    seen = []
    for rank in range(num_ranks):
        options = {"batch_size": 3, "training": True, "order": order, "ranks": DataRanks(rank, num_ranks)}
        with TokenLoader(samples, **options) as loader:
            repo.runs.record(run, loader)
            for epoch in range(num_epochs):
                for batch in loader:
                    numbers = np.asarray(batch.tokens)[:, 0].tolist()
                    values = np.random.default_rng([epoch, *batch.positions]).integers(0, 2000, len(numbers)) / 8
                    loader.record(batch, values)
                    places = [(epoch, position) for position in batch.positions.tolist()]
                    seen += zip(places, numbers, values.tolist(), strict=True)
    by_number = {}
    for _, number, value in sorted(seen):
        by_number.setdefault(number, []).append(value)
    return by_number


def expected(split, by_number, reduce):
    numbers = [sample["tokens"][0] for sample in split]
    return np.array([reduce(by_number[number]) if number in by_number else np.nan for number in numbers], np.float32)


REDUCES = {"last": lambda values: values[-1], "mean": np.mean, "max": max}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("order", [OrderConfig(seed=5), WINDOWED])
def test_values_of_a_split_are_those_of_its_samples(repo, order, num_ranks):
    split, run = repo.dataset("a")["train"], start_run(repo)
    by_number = record(repo, run, split, num_ranks=num_ranks, num_epochs=2, order=order)
    for name, reduce in REDUCES.items():
        values = repo.runs.signal(run, split, reduce=name)
        np.testing.assert_allclose(values, expected(split, by_number, reduce), rtol=1e-6)
    assert repo.runs.signals(run) == ["loss"]


@pytest.mark.parametrize("order", [OrderConfig(seed=5), WINDOWED])
def test_values_of_a_mixture_are_those_of_the_samples_of_each_split(repo, order):
    splits = [repo.dataset(name)["train"] for name in ("a", "b")]
    mixture, run = Mixture(zip(splits, (3, 1), strict=True), block=16), start_run(repo)
    by_number = record(repo, run, mixture, num_ranks=2, num_epochs=3, order=order)
    for split in splits:
        for name, reduce in REDUCES.items():
            values = repo.runs.signal(run, split, reduce=name)
            np.testing.assert_allclose(values, expected(split, by_number, reduce), rtol=1e-6)


def test_values_of_a_weighted_view_are_those_of_its_samples(repo):
    split, run = repo.dataset("a")["train"], start_run(repo)
    view = split.weighted(weights=[1 + number % 5 for number in range(len(split))])
    by_number = record(repo, run, view, num_ranks=2, num_epochs=2, order=OrderConfig(seed=5))
    for name, reduce in REDUCES.items():
        np.testing.assert_allclose(repo.runs.signal(run, view, reduce=name), expected(view, by_number, reduce))


@pytest.mark.slow
def test_a_table_takes_a_key_once_and_not_for_each_epoch(repo, tmp_path):
    keys = [f"{number:01000d}" for number in range(300)]
    tokens = pa.array([[number] for number in range(300)], pa.list_(pa.int32(), 1))
    pq.write_table(pa.table({"key": keys, "tokens": tokens}), tmp_path / "blocks.parquet")
    repo.datasets.ingest(str(tmp_path), "long", shard_bytes=100_000)
    run, split, num_epochs = start_run(repo), repo.dataset("long")["train"], 20
    seen = record(repo, run, split.where("tokens[1] >= 100"), num_ranks=1, num_epochs=num_epochs, order=OrderConfig())
    found = dict(zip(*repo.runs.signal_table(run, "long", reduce="max").to_pydict().values(), strict=True))
    assert found == {keys[number]: max(seen[number]) for number in range(100, 300)}
    program = (
        "import sys, datasvc, pyarrow\n"
        "datasvc.open(sys.argv[1]).runs.signal_table(sys.argv[2], 'long')\n"
        "print(pyarrow.default_memory_pool().max_memory())"
    )
    command = [sys.executable, "-c", program, repo.repository.url, run]
    most = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert most < num_epochs * sum(map(len, keys)) / 2


def test_a_split_that_the_run_did_not_read_is_refused(repo):
    run = start_run(repo)
    record(repo, run, repo.dataset("a")["train"], num_ranks=1, num_epochs=1, order=OrderConfig())
    with pytest.raises(NotFoundError, match="did not read b@1/train"):
        repo.runs.signal(run, repo.dataset("b")["train"])
    with pytest.raises(ConfigError, match="reduce is 'median'; expected one of last, mean, max"):
        repo.runs.signal(run, repo.dataset("a")["train"], reduce="median")


def test_a_loader_without_a_signal_says_how_to_record_one(repo):
    with TokenLoader(repo.dataset("a")["train"], batch_size=2, training=True, ranks=DataRanks()) as loader:
        batch = next(iter(loader))
        with pytest.raises(ConfigError, match=r"call repo\.runs\.record"):
            loader.record(batch, np.ones(2))

"""Signals of a run: what ranks and attempts record is read as one value per position."""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.ledger import signals
from datasvc.ledger.signals import SignalWriter, list_signals, read_last_epoch, read_signal

RUN = "cnn/20261123-221830-3fa9c1"


class Source:
    """A loader as far as a signal needs one."""

    def __init__(self, **order):
        self.signals = None
        self.split = SimpleNamespace(title="pets@3/train")
        self.order = {"version": "ab" * 32, "seed": 1, **order}

    def state_dict(self):
        return {**self.order, "epoch": 3, "position": 7, "decode": "cpu"}


def batch(positions, *, epoch=0, mask=None):
    mask = torch.ones(len(positions), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return SimpleNamespace(epoch=epoch, positions=np.array(positions), mask=mask)


def test_values_of_ranks_and_epochs_are_one_signal(repository):
    for rank in (1, 0):
        writer = SignalWriter(repository, RUN, Source())
        for epoch in (0, 1):
            positions = np.arange(rank, 100, 2)
            writer.record(batch(positions, epoch=epoch), torch.from_numpy(positions / 8 + epoch))
        writer.flush()
    signal = read_signal(repository, RUN)
    np.testing.assert_array_equal(signal.epochs, np.repeat([0, 1], 100))
    np.testing.assert_array_equal(signal.positions, np.tile(np.arange(100), 2))
    np.testing.assert_array_equal(signal.values, np.concatenate([np.arange(100) / 8, np.arange(100) / 8 + 1]))
    assert (signal.order, signal.data) == ({"version": "ab" * 32, "seed": 1}, ("pets@3/train",))
    assert list_signals(repository, RUN) == ["loss"]


def test_the_newest_attempt_counts_where_two_recorded_a_position(repository, monkeypatch):
    for now, value in ((20.0, 2.0), (10.0, 1.0)):
        monkeypatch.setattr("datasvc.ledger.signals.time.time", lambda now=now: now)
        writer = SignalWriter(repository, RUN, Source())
        writer.record(batch([4, 5]), np.full(2, value))
        writer.flush()
    assert read_signal(repository, RUN).values.tolist() == [2.0, 2.0]


def test_the_last_epoch_is_that_of_the_newest_attempt_and_only_its_files_are_read(repository, monkeypatch):
    # The first attempt of two ranks went to epoch 3; the second one continued in epoch 1, and reached epoch 2.
    for now, epochs in ((10.0, range(4)), (20.0, (1, 2))):
        monkeypatch.setattr("datasvc.ledger.signals.time.time", lambda now=now: now)
        for rank in (0, 1):
            writer = SignalWriter(repository, RUN, Source())
            for epoch in epochs:
                for part in (0, 1):
                    positions = np.arange(rank + 4 * part, 4 * part + 4, 2)
                    writer.record(batch(positions, epoch=epoch), positions + now + epoch)
                    writer.flush()
    whole = read_signal(repository, RUN)
    read = []
    monkeypatch.setattr(
        "datasvc.ledger.signals._read", lambda *given, real=signals._read: read.append(given) or real(*given)
    )
    last = read_last_epoch(repository, RUN)
    is_last = whole.epochs == 2
    assert last.positions.tolist() == whole.positions[is_last].tolist() == list(range(8))
    assert last.values.tolist() == whole.values[is_last].tolist() == [position + 22.0 for position in range(8)]
    # Of each rank: the files back to the first one of an earlier epoch, once, and none before it.
    assert sorted(int(path[-10:-8]) for _, path in read) == sorted([7, 6, 5, 4, 3] * 2 + [3, 2, 1] * 2)
    with pytest.raises(ConfigError, match=r"epoch 2 of 'loss' of run .* has more than 7 values"):
        read_last_epoch(repository, RUN, max_values=7)


def test_padding_and_masked_samples_have_no_value(repository):
    writer = SignalWriter(repository, RUN, Source())
    writer.record(batch([1, 2, 0], mask=[True, False, False]), torch.tensor([0.5, 9.0, 9.0]))
    writer.flush()
    assert read_signal(repository, RUN).positions.tolist() == [1]


def test_a_value_takes_two_bytes_and_its_position_next_to_nothing(repository, tmp_path):
    writer = SignalWriter(repository, RUN, Source())
    values = np.random.default_rng(0).normal(2, 1, 65536).astype(np.float32)
    for start in range(0, 65536, 256):
        writer.record(batch(np.arange(start, start + 256) * 4 + 1), values[start : start + 256])
    writer.flush()
    (file,) = (tmp_path / "repo" / "signals").rglob("*.parquet")
    assert file.stat().st_size < 2.02 * 65536
    np.testing.assert_array_equal(pq.read_table(file).column("value").to_numpy(), values.astype(np.float16))


def test_nothing_is_written_without_values(repository):
    writer = SignalWriter(repository, RUN, Source())
    writer.flush()
    with pytest.raises(NotFoundError, match="has no signal 'loss'; it has none: train with --signals loss"):
        read_signal(repository, RUN)


def test_wrong_values_runs_and_writers_are_refused(repository):
    source = Source()
    writer = SignalWriter(repository, RUN, source)
    with pytest.raises(ConfigError, match=r"the values have the shape \[\]; expected \[2\]"):
        writer.record(batch([1, 2]), torch.tensor(0.5))
    with pytest.raises(ConfigError, match="records 'loss' already"):
        SignalWriter(repository, RUN, source)
    with pytest.raises(ConfigError, match="'cnn' names no single run"):
        SignalWriter(repository, "cnn", Source())


def test_attempts_of_different_orders_are_no_single_signal(repository):
    for seed in (1, 2):
        writer = SignalWriter(repository, RUN, Source(seed=seed))
        writer.record(batch([1]), np.ones(1))
        writer.flush()
    with pytest.raises(ConfigError, match="different data or orders"):
        read_signal(repository, RUN)


def test_values_that_an_attempt_recorded_after_a_change_of_weights_do_not_count_for_the_new_weights(
    repository, monkeypatch
):
    mixture = {
        "splits": [{"name": "a@1/train", "version": "ab" * 32}],
        "weights": [1],
        "epoch_samples": 99,
        "block": 2,
    }
    planned = {**mixture, "stages": [{"start": 4, "weights": [1], "ramp": False}]}
    attempts = [(1, mixture, range(10)), (2, {**mixture, "stages": []}, range(4, 7)), (3, planned, range(5, 6))]
    for now, each, positions in attempts:
        monkeypatch.setattr("datasvc.ledger.signals.time.time", lambda now=now: float(now))
        writer = SignalWriter(repository, RUN, Source(mixture=each, mixture_format=2))
        writer.record(batch(list(positions)), np.full(len(positions), now))
        writer.flush()
    signal = read_signal(repository, RUN)
    assert signal.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert signal.values.tolist() == [1, 1, 1, 1, 2, 3]
    assert signal.order["mixture"] == planned


def test_the_data_of_a_signal_is_that_of_the_newest_attempt_which_may_have_added_a_data_set(repository, monkeypatch):
    mixture = {
        "splits": [{"name": "a@1/train", "version": "ab" * 32}],
        "weights": [1],
        "epoch_samples": 99,
        "block": 2,
    }
    added = {
        **mixture,
        "splits": [*mixture["splits"], {"name": "b@1/train", "version": "cd" * 32}],
        "weights": [1, 0],
    }
    added["stages"] = [{"start": 4, "weights": [1, 1], "ramp": False}]
    for now, each in ((1, mixture), (2, added)):
        monkeypatch.setattr("datasvc.ledger.signals.time.time", lambda now=now: float(now))
        monkeypatch.setattr("datasvc.ledger.signals.secrets.token_hex", lambda _, now=now: f"{now:012x}")
        source = Source(mixture=each, mixture_format=2)
        source.split = SimpleNamespace(splits=[SimpleNamespace(title=split["name"]) for split in each["splits"]])
        writer = SignalWriter(repository, RUN, source)
        writer.record(batch([now]), np.ones(1))
        writer.flush()
    for signal in (read_signal(repository, RUN), read_last_epoch(repository, RUN)):
        assert signal.data == ("a@1/train", "b@1/train")
        assert signal.order["mixture"] == added


def test_a_damaged_file_is_named(repository, tmp_path):
    writer = SignalWriter(repository, RUN, Source())
    writer.record(batch([1]), np.ones(1))
    writer.flush()
    (file,) = (tmp_path / "repo" / "signals").rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match=file.name):
        read_signal(repository, RUN)

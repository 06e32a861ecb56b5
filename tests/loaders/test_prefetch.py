import pytest

from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig, ImageLoader


def make(digits, prefetch):
    return ImageLoader(
        digits["train"], batch_size=64, training=True, size=32, decode=DecodeConfig(num_threads=1, prefetch=prefetch)
    )


def test_what_is_prefetched_changes_no_batch(digits):
    with make(digits, 0) as at_call, make(digits, 3) as ahead:
        for ours, others in zip(at_call, ahead, strict=True):
            assert ours.images.equal(others.images)
            assert ours.labels.equal(others.labels)
        assert at_call.state_dict() == ahead.state_dict()


def test_a_loader_that_prefetches_nothing_has_nothing_under_way_while_the_caller_trains(digits):
    with make(digits, 0) as loader:
        for number, _ in enumerate(loader, start=1):
            assert loader.report().totals.num_steps == number
            assert not loader._in_progress


def test_a_negative_number_of_batches_cannot_be_prefetched(digits):
    with pytest.raises(ConfigError, match="prefetch is -1; expected at least 0"):
        make(digits, -1)

"""Threads and prefetch that are chosen for the user: within what the container may use, bounded, and visible."""

import pytest

from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.images import image_loader
from datasvc.loaders.profiling import tunable
from datasvc.threads import count_processors
from tests.loaders.profiling.test_tuning import report


@pytest.mark.parametrize(
    "limits",
    [{"cpu.max": "150000 100000\n"}, {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}],
)
def test_a_container_gets_threads_for_the_processor_time_that_it_has(tmp_path, monkeypatch, limits):
    """joblib/loky#354, python/cpython#149452, llmmanorg/llmman#322: a thread for each processor of the host."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_processors(tmp_path) == 2


@pytest.mark.parametrize("text", [None, "max 100000\n", "6500000 100000\n", "of another kernel\n"])
def test_without_a_lower_limit_all_processors_are_used(tmp_path, monkeypatch, text):
    """socketry/async-job-adapter-active_job#17: 32 processors of a host; here those of the affinity mask."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert count_processors(tmp_path) == 64


def test_prefetched_batches_do_not_fill_the_memory(digits, monkeypatch):
    """tensorflow/tensorflow#33516, google/scaaml#53: AUTOTUNE took more and more memory, to the end of the process.

    tensorflow/tensorflow#72369, #21070: the values that its autotune had chosen were not shown.
    """
    batch_bytes = 64 * 3 * 32 * 32
    monkeypatch.setattr(image_loader, "count_rank_processors", count_processors)
    monkeypatch.setattr(tunable, "_free_bytes", lambda _: 8 * 5 * batch_bytes)  # of which an eighth may be used
    decode = DecodeConfig("cpu", num_threads=count_processors())
    options = {"batch_size": 64, "size": 32, "pixels": "uint8", "training": True}
    with ImageLoader(digits["train"], **options, decode=decode) as loader:
        chosen = [loader.tune(report(100 * 2**epoch)).setting.prefetch for epoch in range(6)]
        assert chosen == [4, 5, 5, 5, 5, 5]
        assert loader.tune().setting.prefetch == 5

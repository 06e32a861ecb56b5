"""Threads and prefetch from reports: they rise while that helps, end, and change no batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache import Cache
from datasvc.ledger.audit import audit_folders
from datasvc.loaders import AudioLoader, DecodeConfig, ImageLoader, TokenFormat, TokenLoader, VideoLoader
from datasvc.loaders.images import image_loader
from datasvc.loaders.profiling import tunable
from datasvc.loaders.profiling.bottleneck import Resources, diagnose
from datasvc.loaders.profiling.report import Report
from datasvc.loaders.profiling.step_times import Stage, Totals
from datasvc.loaders.profiling.tuning import LoaderSetting, LoaderTuning, choose_setting
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.support.sounds import encode, ingest_files, noise
from tests.support.videos import video

LIMITS = LoaderSetting(num_threads=6, prefetch=16)
START = LoaderTuning(LoaderSetting(2, 2))


def report(rate, stage=Stage.DECODE, *, share=0.5, bound=1.0, steps=100):
    """A report on steps in which the consumer waited for a stage for a share of the time."""
    seconds = steps / rate
    blocked = {stage: share * seconds}
    waiting = blocked if bound else {}
    totals = Totals(
        steps, steps, share * seconds, (1 - share) * seconds, blocked, waiting, num_bound_steps=int(bound * steps)
    )
    return Report(totals, diagnose(totals, Resources()), 0, 0, 0, ())


def climb(rates, **options):
    """The settings after reports with these rates."""
    tuning, settings = START, []
    for rate in rates:
        tuning = choose_setting(tuning, report(rate, **options), LIMITS)
        settings.append((tuning.setting.num_threads, tuning.setting.prefetch))
    return settings, tuning


def test_threads_rise_to_the_processors_while_each_rise_serves_more_and_then_prefetch():
    assert climb([100, 190, 280, 400, 401, 402])[0] == [(4, 2), (6, 2), (6, 4), (6, 8), (6, 4), (6, 4)]


def test_what_did_not_help_is_taken_back_and_the_other_is_tried():
    settings, tuning = climb([100, 104, 100, 150, 151, 150])
    assert settings == [(4, 2), (2, 2), (2, 4), (2, 8), (2, 4), (2, 4)]
    assert "no gain" in tuning.reason


def test_prefetch_rises_first_where_only_some_batches_are_late():
    assert climb([100, 150], bound=0.2)[0] == [(2, 4), (2, 8)]


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (report(100, share=0.02), "the consumer is the limit"),
        (report(100, Stage.ORIGIN, bound=0), "origin is the limit"),
        (report(100, bound=0), "decode is the limit, which threads and prefetch do not change"),
        (report(100, steps=19), "19 steps were measured"),
    ],
)
def test_a_loader_that_is_fast_enough_or_slow_for_another_reason_stays_as_it_is(measured, reason):
    chosen = choose_setting(START, measured, LIMITS)
    assert chosen.setting == START.setting
    assert reason in chosen.reason


REPORTS = st.builds(
    report,
    st.floats(1, 1e4),
    st.sampled_from([stage for stage in Stage if stage is not Stage.START]),
    share=st.floats(0, 0.9),
    bound=st.floats(0, 1),
    steps=st.integers(1, 100),
)


@given(st.lists(REPORTS, max_size=60), st.integers(1, 9), st.integers(0, 40))
def test_whatever_is_measured_settings_stay_within_limits_and_change_a_bounded_number_of_times(
    reports, threads, prefetch
):
    start = LoaderSetting(threads, prefetch)
    limits = LoaderSetting(max(threads, 6), max(prefetch, 16))
    tuning, changes = LoaderTuning(start), 0
    for measured in reports:
        before, tuning = tuning.setting, choose_setting(tuning, measured, limits)
        changes += tuning.setting != before
        assert start.num_threads <= tuning.setting.num_threads <= limits.num_threads
        assert start.prefetch <= tuning.setting.prefetch <= limits.prefetch
    assert changes <= 3 + 5 + 2  # doublings from 1 to 6 and from 0 to 16, and one way back of each


def read(loader, rates):
    """The batches of an epoch for each rate, after which the loader gets a report with that rate."""
    batches, settings = [], []
    for rate in rates:
        batches += [batch.images for batch in loader.numpy()]
        tuning = loader.tune(report(rate))
        settings.append((tuning.setting.num_threads, tuning.setting.prefetch))
        assert (loader._config.num_threads, loader._config.prefetch) == settings[-1]
    return np.concatenate(batches), settings


def open_loader(split, cache=None, prefetch=1, **options):
    decode = DecodeConfig("cpu", num_threads=1, prefetch=prefetch)
    sizes = {"batch_size": 64, "size": 32, "pixels": "uint8"}
    return ImageLoader(split, **sizes, training=True, decode=decode, cache=cache, **options)


@pytest.mark.slow
def test_a_tuned_loader_serves_the_bits_of_one_that_is_not(digits, monkeypatch, tmp_path):
    monkeypatch.setattr(image_loader, "count_rank_processors", lambda: 8)
    with Cache(tmp_path / "cache", budget="50MB") as cache, open_loader(digits["train"], cache) as tuned:
        found, settings = read(tuned, [100, 200, 400, 400, 100])
    with open_loader(digits["train"]) as plain:
        expected = np.concatenate([batch.images for _ in settings for batch in plain.numpy()])
    assert settings == [(2, 1), (4, 1), (8, 1), (4, 1), (4, 2)]
    np.testing.assert_array_equal(found, expected)


def test_prefetch_that_the_cache_or_the_memory_cannot_hold_is_not_used(digits, monkeypatch, tmp_path):
    monkeypatch.setattr(tunable, "_free_bytes", lambda _: 0)
    with open_loader(digits["train"]) as loader:
        assert loader.tune(report(100, bound=0.2)).setting.prefetch == 1
    monkeypatch.undo()
    # Three shards, which three batches in a row need; five need four.
    with (
        Cache(tmp_path / "cache", budget="1000kB") as cache,
        open_loader(digits["train"], cache, prefetch=2, shuffle=None) as loader,
    ):
        chosen = loader.tune(report(100, bound=0.2))
        assert chosen.setting.prefetch == 2
        assert "the cache cannot hold prefetch=4: the order of" in chosen.reason
        assert loader.tune(report(100, bound=0.2)).raised == "num_threads"
        assert loader._resources().prefetch == 2
        assert sum(len(batch.positions) for batch in loader.numpy()) == 1408


def test_a_loader_that_is_tuned_inside_its_loop_records_all_batches_and_keeps_its_state(digits, tmp_path):
    with (
        Cache(tmp_path / "cache", budget="50MB") as cache,
        open_loader(digits["train"], cache, ledger=tmp_path / "ledger") as loader,
    ):
        for number, _ in enumerate(loader.numpy()):
            state = loader.state_dict()
            if number == 3:
                assert loader.tune(report(100, bound=0.2)).setting.prefetch == 2
                assert loader.state_dict() == state
    assert audit_folders([tmp_path / "ledger"]).is_proven


@pytest.mark.parametrize("kind", [AudioLoader, VideoLoader])
def test_loaders_of_clips_decode_with_what_was_chosen(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.loaders.decode.choice.choice.count_processors", lambda: 4)
    files = {f"{number}.wav": encode(noise(1600, seed=number)) for number in range(8)}
    if kind is VideoLoader:
        files = {f"{number}.mp4": video("mpeg4", frames=12 + number) for number in range(8)}
    split = ingest_files(Repository.create(str(tmp_path / "repo")), tmp_path / "files", files)
    sizes = {"seconds": 0.05} if kind is AudioLoader else {"size": 16, "frames": 2}
    options = {"batch_size": 4, "training": True, "num_threads": 1, **sizes}

    def inputs(loader):
        return [next(iter(batch)) for batch in loader.numpy()]

    with kind(split, **options, prefetch=0) as plain, kind(split, **options, prefetch=0) as tuned:
        for rate, expected in ((100, (2, 0)), (200, (4, 0)), (400, (4, 2)), (410, (4, 0))):
            np.testing.assert_array_equal(inputs(tuned), inputs(plain))
            setting = tuned.tune(report(rate)).setting
            assert (setting.num_threads, setting.prefetch) == expected
            decoder = tuned._make_decoder()
            assert decoder._pool._max_workers == setting.num_threads
            decoder.close()


def test_a_loader_of_tokens_has_no_threads_to_tune(tmp_path):
    blocks = np.arange(4000, dtype=np.int32).reshape(1000, 4)
    repository = Repository.create(str(tmp_path / "repo"))
    ingest(repository, [{"tokens": block} for block in blocks], "tokens")
    split = open_dataset(repository, "tokens")["train"]
    with TokenLoader(split, batch_size=4, training=True, tokens=TokenFormat(block_tokens=4)) as loader:
        assert sum(len(batch.positions) for batch in loader.numpy()) == 1000
        assert loader.tune().setting == LoaderSetting(1, 2)

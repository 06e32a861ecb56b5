"""Where the time went: a delay in each stage in turn, on a clock that only delays move, makes the report name it."""

import itertools
import json
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig, ImageLoader, LoaderCollector
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.gpu.upload import UploadBackend
from datasvc.loaders.images import image_loader
from datasvc.loaders.images.image_decoder import ImageDecoder
from datasvc.loaders.profiling.step_times import Stage, TimeSpan, trace_events
from datasvc.shards import ingest, open_dataset
from datasvc.testing import FakeClock
from tests.drawing.hostile import parsed, text_of, with_class
from tests.loaders.decode.recorded_stream import RecordedStream

CONSUMER_MS = 10


class Delays:
    """Makes calls take longer, by the loader's clock."""

    def __init__(self, clock, monkeypatch):
        self._clock = clock
        self._monkeypatch = monkeypatch

    def add(self, owner, name, milliseconds=100):
        """Delay every call of a method."""
        real = getattr(owner, name)

        def delayed(*arguments, **options):
            self._clock.advance(milliseconds)
            return real(*arguments, **options)

        self._monkeypatch.setattr(owner, name, delayed)


@pytest.fixture
def clock():
    """A clock of milliseconds."""
    return FakeClock()


@pytest.fixture
def delays(clock, monkeypatch):
    return Delays(clock, monkeypatch)


@pytest.fixture
def make(digits, clock):
    """Return a way to make loaders of 22 steps an epoch, all of which have the same clock."""
    loaders = []

    def make(split="train", **options):
        options = {
            "batch_size": 64,
            "training": True,
            "size": 32,
            "decode": DecodeConfig(backend="cpu", num_threads=2),
        } | options
        loader = ImageLoader(digits[split], **options)
        loader.profiler.clock = lambda: round(clock() * 1e6)
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()


def train(loader, clock, num_steps=None, consumer_ms=CONSUMER_MS):
    """Run an epoch, or some steps of it."""
    for _ in itertools.islice(loader, num_steps):
        clock.advance(consumer_ms)


def assert_starved_by(loader, stage):
    report = loader.report()
    assert report.bottleneck.stage is stage, str(report)
    assert f"starved by {stage}:" in str(report)
    assert report.longest[0].stage is stage
    assert report.to_dict()["limit"] == stage.value


def test_shards_of_a_slow_repository_are_the_origin_s(make, clock, delays, digits):
    delays.add(digits["train"].origin, "open_shard")
    loader = make()
    train(loader, clock)
    assert_starved_by(loader, Stage.ORIGIN)
    # All eight shards are opened for the first batch.
    assert loader.report().totals.blocked_s == {Stage.ORIGIN: pytest.approx(0.8)}
    assert loader.report().longest[0].step == 1


def test_shards_that_the_cache_lacks_are_the_origin_s_and_those_it_has_the_cache_s(
    make, clock, delays, tmp_path, monkeypatch
):
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        for stage in (Stage.ORIGIN, Stage.CACHE):
            loader = make(cache=cache)
            (followed,) = loader._cached_stores
            # Nobody fetches ahead, who might be faster than the loader.
            monkeypatch.setattr(followed, "_start", lambda: None)
            monkeypatch.setattr(followed, "_fetch", lambda _info: None)
            delays.add(followed, "open")
            train(loader, clock)
            assert_starved_by(loader, stage)
            loader.close()


def test_letting_go_of_shards_is_the_cache_s(make, clock, delays, tmp_path):
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        loader = make(cache=cache, shuffle=None)
        (followed,) = loader._cached_stores
        delays.add(followed, "release_shard")
        train(loader, clock)
        assert_starved_by(loader, Stage.CACHE)


def test_samples_that_are_read_before_their_shard_is_here_are_the_origin_s(
    repository, tmp_path, clock, delays, folder
):
    ingest(repository, str(folder), "small", shard_bytes=1)
    split = open_dataset(repository, "small")["train"]
    with (
        Cache(tmp_path / "cache", budget="50MB") as cache,
        ImageLoader(
            split,
            batch_size=4,
            training=True,
            size=32,
            cache=cache,
            decode=DecodeConfig(backend="cpu", num_threads=1),
        ) as loader,
    ):
        loader.profiler.clock = lambda: round(clock() * 1e6)
        (followed,) = loader._cached_stores
        delays.add(followed, "open_early")
        train(loader, clock, 1)
        assert_starved_by(loader, Stage.ORIGIN)


@pytest.mark.parametrize(
    ("outcome", "stage"),
    [("peer", Stage.PEER), ("resident", Stage.ORIGIN)],
    ids=["a peer gave it", "somebody else brought it meanwhile"],
)
def test_a_shard_that_was_not_here_is_laid_to_whoever_gave_it(
    make, clock, delays, tmp_path, monkeypatch, outcome, stage
):
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        loader = make(cache=cache)
        (followed,) = loader._cached_stores
        real = followed.open
        monkeypatch.setattr(followed, "open", lambda info: (real(info)[0], outcome))
        # The stager may have fetched the shard already.
        monkeypatch.setattr(followed, "is_resident", lambda info: False)
        delays.add(followed, "open")
        train(loader, clock)
        assert_starved_by(loader, stage)


def test_planning_and_views_are_read_s(make, clock, monkeypatch):
    loader = make()
    real = loader._batches.stream

    def slow(*cursor):
        for batch in real(*cursor):
            clock.advance(100)
            yield batch

    monkeypatch.setattr(loader._batches, "stream", slow)
    train(loader, clock)
    assert_starved_by(loader, Stage.READ)


@pytest.mark.parametrize("call", ["feed", "take"])
def test_a_slow_decoder_is_named(make, clock, delays, call):
    delays.add(CpuBackend, call)
    loader = make()
    train(loader, clock)
    assert_starved_by(loader, Stage.DECODE)
    assert "images/s offered, 6,400 asked" in str(loader.report())


def test_decoding_threads_that_are_waited_for_are_named_whatever_else_takes_longer_meanwhile(make, clock, delays):
    delays.add(CpuBackend, "take", 20)
    delays.add(ImageDecoder, "_collate", 30)
    loader = make()
    train(loader, clock)
    assert loader.report().bottleneck.stage is Stage.DECODE


def test_making_a_batch_of_the_samples_is_collate_s(make, clock, delays):
    delays.add(ImageDecoder, "_collate")
    loader = make()
    train(loader, clock)
    assert_starved_by(loader, Stage.COLLATE)


def test_copying_to_the_device_is_transfer_s(make, clock, delays, monkeypatch):
    stream = RecordedStream()

    def make_backend(config, _backend, *, framework, profiler):
        return UploadBackend(config, backend="cpu", device="cpu", profiler=profiler, stream=stream)

    monkeypatch.setattr(image_loader, "make_backend", make_backend)
    delays.add(stream, "copy")
    loader = make()
    train(loader, clock)
    assert_starved_by(loader, Stage.TRANSFER)


def test_a_slow_ledger_is_named(make, clock, delays, tmp_path):
    loader = make(ledger=tmp_path / "ledger")
    delays.add(loader._ledger, "write")
    train(loader, clock)
    assert_starved_by(loader, Stage.LEDGER)


def test_a_slow_consumer_is_the_limit_itself(make, clock, delays):
    delays.add(ImageDecoder, "_collate", 1)
    loader = make()
    train(loader, clock, consumer_ms=100)
    report = loader.report()
    assert report.bottleneck.stage is None
    assert report.totals.consumer_s == pytest.approx(2.2)
    assert "not starved: the consumer is the limit" in str(report)
    assert report.to_dict()["limit"] == "consumer"


def test_a_decoder_that_takes_long_to_start_is_shown_and_not_blamed(make, clock, delays):
    loader = make()
    delays.add(loader, "_make_decoder", 60_000)
    train(loader, clock)
    report = loader.report()
    assert report.totals.blocked_s == {Stage.START: pytest.approx(60)}
    assert report.bottleneck.stage is None
    assert (report.longest[0].step, report.longest[0].stage) == (1, Stage.START)


def test_what_happens_between_two_epochs_is_nobody_s(make, clock):
    loader = make()
    train(loader, clock)
    clock.advance(60_000)  # an evaluation
    train(loader, clock, 5)
    clock.advance(60_000)  # left in the middle
    train(loader, clock, 5)
    totals = loader.report().totals
    assert (totals.num_steps, totals.consumer_s) == (32, pytest.approx(0.32))


def test_a_report_begins_anew_where_it_is_told_to(make, clock, delays, digits):
    delays.add(digits["train"].origin, "open_shard")
    loader = make()
    train(loader, clock)
    loader.restart_report()
    train(loader, clock)
    report = loader.report()
    assert (report.totals.num_steps, report.bottleneck.stage) == (22, None)
    assert report.longest[-1].step > 22


def test_the_decoding_threads_are_seen_at_work(digits):
    with ImageLoader(
        digits["train"], batch_size=64, training=True, size=32, decode=DecodeConfig(backend="cpu", num_threads=2)
    ) as loader:
        for _ in loader:
            pass
        totals = loader.report().totals
        assert totals.beside_s[Stage.DECODE] > 0
        assert 1 <= totals.num_beside[Stage.DECODE] <= 2
        names = {span.thread_name for span in loader.profiler.spans() if span.name == Stage.DECODE}
        assert threading.current_thread().name in names
        assert any(name.startswith("datasvc-decode") for name in names)


def test_the_table_shows_every_stage_that_took_time_and_ends_with_the_verdict(make, clock, delays, digits):
    delays.add(digits["train"].origin, "open_shard")
    delays.add(CpuBackend, "take", 5)
    loader = make()
    train(loader, clock)
    lines = str(loader.report()).splitlines()
    assert lines[0] == "22 steps, 1,408 images"
    assert [line.split()[0] for line in lines[1:-2]] == ["stage", "origin", "decode", "consumer"]
    assert lines[2].split()[1:] == ["0.80", "70.8%", "36.36"]
    assert lines[-2] == (
        "waits: 5.0 ms at the median, 5.0 ms at 95 %, 805.0 ms at most; longest: step 1 805.0 ms (origin), "
        "step 2 5.0 ms (decode), step 3 5.0 ms (decode), step 4 5.0 ms (decode), step 5 5.0 ms (decode)"
    )
    assert lines[-1] == str(loader.report().bottleneck)


def test_a_report_is_json(make, clock):
    loader = make()
    empty = loader.report()
    assert str(empty) == "nothing was served yet"
    train(loader, clock, 3, consumer_ms=0)
    for report in (empty, loader.report()):
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == str(report.bottleneck)


def test_the_trace_opens_and_its_events_nest(make, clock, delays, tmp_path):
    for owner, name in ((CpuBackend, "take"), (ImageDecoder, "_collate")):
        delays.add(owner, name, 3)
    loader = make()
    train(loader, clock)
    path = tmp_path / "trace.json"
    path.write_text("an old one")
    loader.write_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names["process_name"] == "digits@1, rank 0"
    assert {"wait", "consumer", "decode", "collate", "read"} <= {span["name"] for span in spans}
    assert [span["args"]["step"] for span in spans if span["name"] == "wait"] == list(range(1, 23))
    assert sum(span["dur"] for span in spans if span["name"] == "consumer") == 22 * CONSUMER_MS * 1000
    for thread in {span["tid"] for span in spans}:
        open_until = []
        for span in (span for span in spans if span["tid"] == thread):
            while open_until and open_until[-1] <= span["ts"]:
                open_until.pop()
            assert not open_until or span["ts"] + span["dur"] <= open_until[-1]
            if span["dur"]:
                open_until.append(span["ts"] + span["dur"])
    assert list(tmp_path.glob(".tmp*")) == []


def test_events_are_microseconds_the_outer_before_the_inner():
    inner = TimeSpan("read", 7, "MainThread", 1500, 500, 3)
    outer = TimeSpan("wait", 7, "MainThread", 1500, 2500, 3)
    assert [(event["name"], event.get("ts"), event.get("dur")) for event in trace_events([inner, outer], 1, "p")] == [
        ("process_name", None, None),
        ("thread_name", None, None),
        ("wait", 1.5, 2.5),
        ("read", 1.5, 0.5),
    ]


def test_a_trace_that_cannot_be_written_is_an_error_that_says_where(make, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        make().write_trace(tmp_path / "nowhere" / "trace.json")


def test_prometheus_reads_the_numbers_of_each_loader(make, clock, delays):
    delays.add(CpuBackend, "take", 40)
    loaders = {"train": make(), "val": make("val", training=False, decode=DecodeConfig(num_threads=1))}
    train(loaders["train"], clock, 5)
    loaders["train"].restart_report()
    train(loaders["train"], clock, 4)
    registry = CollectorRegistry()
    registry.register(LoaderCollector(loaders))
    samples = {
        (sample.name.removeprefix("datasvc_loader_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples["steps_total", "train"] == 9  # counters never go back
    assert samples["samples_total", "train"] == 9 * 64
    assert samples["blocked_seconds_total", "train", "decode"] == pytest.approx(0.36)
    assert samples["consumer_seconds_total", "train"] == pytest.approx(0.09)
    assert samples["starved_ratio", "train"] == pytest.approx(0.8)
    assert samples["offered", "train"] == pytest.approx(64 / 0.05)
    assert samples["asked", "train"] == pytest.approx(6400)
    assert samples["steps_total", "val"] == 0
    assert {stage for name, *_, stage in samples if name == "blocked_seconds_total"} == set(Stage)


def test_a_report_is_shown_in_a_notebook_and_plotted(make, clock, delays):
    pytest.importorskip("matplotlib").use("Agg")
    loader = make()
    assert "nothing was served yet" in text_of(parsed(loader.report()._repr_html_()))
    delays.add(CpuBackend, "take")
    train(loader, clock, 4)
    report = loader.report()
    root = parsed(report._repr_html_())
    assert any("decode: 100 ms per step" in text_of(row) for row in with_class(root, "row"))
    assert "starved by decode" in text_of(root)
    ax = report.plot()
    bars = {label.get_text(): bar.get_width() for label, bar in zip(ax.get_yticklabels(), ax.patches, strict=True)}
    assert bars["consumer"] == pytest.approx(CONSUMER_MS)
    assert bars["decode"] == pytest.approx(100)

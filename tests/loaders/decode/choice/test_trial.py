"""Backends are tried in a process of their own: one that ends it, hangs or decodes to other pictures is refused."""

import pickle
from itertools import count

import numpy as np
import pytest

from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.decode.backend import DecodedImages
from datasvc.loaders.decode.choice.trial import TrialBatch, TrialJob, answer_trials, measure_rate, try_backends
from datasvc.loaders.decode.gpu.gpu import GpuBackend
from tests.loaders.decode.photos import broken, config, on_cpu, photos, windows
from tests.support.odd_images import HEIGHT, WIDTH, encode, picture

ODD = "tests.loaders.decode.odd_child"


def batch(number, seed=0):
    return TrialBatch([image.tobytes() for image in photos(number, seed=seed)], windows(number, seed=seed))


@pytest.mark.parametrize(
    ("behaviour", "deadline_s", "reason"),
    [
        ("segfault", 60, "ended its process with SIGSEGV"),
        ("status", 60, "ended its process with status 3"),
        ("hang", 0.2, "did not answer within 0 s"),
    ],
)
def test_a_backend_that_ends_its_process_or_hangs_is_refused_with_the_reason(
    monkeypatch, behaviour, deadline_s, reason
):
    monkeypatch.setenv("ODD_CHILD", behaviour)
    trials = try_backends(config(), ["gpu-window"], [batch(2)], module=ODD, deadline_s=deadline_s)
    assert trials.rates == {}
    assert reason in trials.refused["gpu-window"]


def test_one_process_tries_all_as_long_as_it_lives(monkeypatch):
    monkeypatch.setenv("ODD_CHILD", "answer")
    trials = try_backends(config(), ["cpu", "gpu-window"], [batch(2)], module=ODD)
    assert (trials.rates, trials.refused) == ({"cpu": 50.0, "gpu-window": 70.0}, {})


@pytest.mark.slow
def test_after_a_segfault_another_process_tries_the_rest_on_the_same_images(monkeypatch):
    monkeypatch.setenv("ODD_CHILD", "segfault at windows")
    candidates = ["cpu", "gpu-window", "gpu-whole", "pillow"]
    trials = try_backends(config(), candidates, [batch(8, seed) for seed in (0, 20)], module=ODD)
    assert trials.refused == {"gpu-window": "it ended its process with SIGSEGV"}
    assert trials.rates.keys() == {"cpu", "gpu-whole", "pillow"}
    assert min(trials.rates.values()) > 0


def answers(tmp_path, make, *candidates, settings=None, batches=None):
    """Return what a child answers, here in this process."""
    path = tmp_path / "batches"
    path.write_bytes(pickle.dumps([batch(8)] if batches is None else batches))
    return list(answer_trials(TrialJob(config(**(settings or {})), candidates, path), make))


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_backend_that_decodes_to_the_right_pictures_has_a_rate_in_every_format(
    tmp_path, monkeypatch, output, layout
):
    monkeypatch.setattr("datasvc.loaders.decode.choice.trial._MEASURED_S", 0)
    settings = {"output": output, "layout": layout}
    damaged = batch(8).images
    damaged = [*damaged[:2], broken(np.frombuffer(damaged[2], np.uint8)).tobytes(), *damaged[3:]]
    found = answers(
        tmp_path,
        lambda config, backend: on_cpu(**settings),
        "cpu",
        settings=settings,
        batches=[TrialBatch(damaged, windows(8))],
    )
    assert [list(answer) for answer in found] == [["rate"]]


def test_where_no_image_is_a_jpeg_a_backend_decodes_one_all_the_same(tmp_path):
    """As a GPU gets nothing else, and the first one could end the run."""
    png = encode(picture(), "PNG")
    fed = []

    def make(config, backend):
        made = GpuBackend(config)
        made.feed = lambda images, windows, feed=made.feed: fed.append(images[0].tobytes()) or feed(images, windows)
        return made

    found = answers(tmp_path, make, "gpu-window", batches=[TrialBatch([png], windows(1, width=WIDTH, height=HEIGHT))])
    assert [list(answer) for answer in found] == [["rate"]]
    assert [each for each in fed if each[:2] == b"\xff\xd8"] == fed[1:2]


class Wrong:
    """A backend whose images are zeros."""

    closed = 0

    def feed(self, images, _windows):
        self._count = len(images)

    def take(self):
        return DecodedImages(np.zeros((self._count, 3, 24, 24), np.float32), {})

    def close(self):
        Wrong.closed += 1


def test_a_backend_that_gives_other_pictures_without_an_error_is_refused_and_the_process_tries_no_more(tmp_path):
    found = answers(tmp_path, lambda config, backend: Wrong(), "gpu-window", "gpu-whole")
    assert [list(answer) for answer in found] == [["refused"]]
    assert "differs from Pillow's by" in found[0]["refused"]
    assert Wrong.closed == 1


def test_an_exception_of_a_backend_is_the_reason(tmp_path):
    def make(config, backend):
        raise RuntimeError("no such device")

    assert answers(tmp_path, make, "gpu-window") == [{"refused": "RuntimeError: no such device"}]


def test_a_rate_counts_what_was_decoded_while_the_clock_ran():
    """The clock ticks a tenth of a second per batch: 8 images in it are 80 per second."""
    ticks = count()
    backend = on_cpu()
    rate = measure_rate(backend, [batch(8)], prefetch=2, duration_s=0.5, clock=lambda: next(ticks) / 10)
    backend.close()
    assert rate == pytest.approx(80)


class Noting:
    """A backend that notes which images it is fed, and keeps none of them alive."""

    def __init__(self):
        self.fed, self._sizes = [], []

    def feed(self, images, windows):
        assert isinstance(windows, Windows)
        self.fed.append(images[0].tobytes())
        self._sizes.append(len(images))

    def take(self):
        return DecodedImages(np.empty((self._sizes.pop(0), 1)), {})


def test_a_rate_is_measured_on_distinct_batches_in_turn():
    ticks = count()
    batches = [batch(size, seed) for size, seed in ((2, 0), (3, 10), (4, 20))]
    backend = Noting()
    rate = measure_rate(backend, batches, prefetch=2, duration_s=0.3, clock=lambda: next(ticks) / 10)
    first = [each.images[0] for each in batches]
    assert backend.fed[:5] == [first[0], first[1], first[2], first[0], first[1]]
    assert rate == pytest.approx((3 + 4 + 2) / 0.3)  # the first batch starts the clock
    assert not backend._sizes

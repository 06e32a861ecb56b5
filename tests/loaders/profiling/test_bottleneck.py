"""What limits a run, judged from sums alone."""

import dataclasses

import pytest

from datasvc.loaders.profiling.bottleneck import Resources, diagnose
from datasvc.loaders.profiling.step_times import Stage, Totals

CPU = Resources(unit="images", decoder="cpu", num_threads=4, num_processors=16, has_cache=True)


def totals(*, consumer_s, steps=100, batch=64, waiting_s=None, bound=0, beside_s=None, threads=4, **blocked_s):
    """Return sums in which stages took so many seconds, by name."""
    blocked = {Stage(name): seconds for name, seconds in blocked_s.items()}
    return Totals(
        num_steps=steps,
        num_samples=steps * batch,
        wait_s=sum(blocked.values()),
        consumer_s=consumer_s,
        blocked_s=blocked,
        waiting_s={Stage.DECODE: waiting_s} if waiting_s else {},
        beside_s={Stage.DECODE: beside_s} if beside_s else {},
        num_beside={Stage.DECODE: threads} if beside_s else {},
        num_bound_steps=bound,
    )


def test_a_run_that_waits_for_decode_is_told_the_rates_and_how_many_threads_are_missing():
    # 6,400 images: the consumer takes 10 s for them, the decoder 15.
    verdict = diagnose(totals(consumer_s=10, decode=5, waiting_s=5, bound=100), CPU)
    assert verdict.stage is Stage.DECODE
    assert verdict.starved_share == pytest.approx(1 / 3)
    assert str(verdict) == (
        "starved by decode: 427 images/s offered, 640 asked; two more decode threads or GPU decode"
    )


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.START])
def test_the_stage_that_blocks_longest_is_named_with_advice(stage):
    others = {each.value: 0.5 for each in Stage if each is not stage}
    verdict = diagnose(totals(consumer_s=10, **others, **{stage.value: 6}), CPU)
    assert verdict.stage is stage
    assert str(verdict).startswith(f"starved by {stage}: ")
    assert len(verdict.advice) > 20


def test_threads_beside_that_most_steps_wait_for_are_the_limit_whatever_is_done_meanwhile():
    """With decode at 100 ms a batch, copying for 70 ms and no wait for decode but the rest: copying hides in it."""
    times = {"consumer_s": 1, "transfer": 7, "decode": 2, "waiting_s": 2}
    assert diagnose(totals(**times, bound=95), CPU).stage is Stage.DECODE
    assert diagnose(totals(**times, bound=10), CPU).stage is Stage.TRANSFER


def test_the_advice_for_transfers_is_no_change_of_batches_that_are_pinned_bytes_already():
    advice = diagnose(totals(consumer_s=1, transfer=7), CPU).advice
    assert "decode='gpu'" in advice
    assert "pinned" not in advice


def test_a_consumer_that_hardly_waits_is_the_limit():
    verdict = diagnose(totals(consumer_s=10, decode=0.1, read=0.1), CPU)
    assert (verdict.stage, verdict.headroom, verdict.advice) == (None, None, "")
    assert str(verdict) == (
        "not starved: the consumer is the limit; it takes 627 images/s and waits 2.0% of the time"
    )


def test_headroom_is_what_the_slower_of_decoding_threads_and_calls_leaves():
    # Four threads were busy for 20 s in all: 5 s each, in the 10 s of the consumer.
    assert diagnose(totals(consumer_s=10, read=0.2, beside_s=20), CPU).headroom == pytest.approx(1.0)
    assert diagnose(totals(consumer_s=10, read=0.4, beside_s=0.8), CPU).headroom == pytest.approx(24.0)
    assert "not starved: the consumer is the limit, 100% headroom;" in str(
        diagnose(totals(consumer_s=10, read=0.2, beside_s=20), CPU)
    )


def test_making_the_decoder_is_not_held_against_a_run():
    verdict = diagnose(totals(consumer_s=10, start=100, read=0.1), CPU)
    assert verdict.stage is None
    assert verdict.asked == pytest.approx(640)


def test_a_consumer_that_takes_no_time_asks_for_any_number():
    verdict = diagnose(totals(consumer_s=0, decode=10, waiting_s=10, bound=100), CPU)
    assert (verdict.asked, verdict.starved_share) == (None, 1)
    assert str(verdict).startswith("starved by decode: 640 images/s offered, any number asked; 12 more decode")


def test_nothing_served_is_no_verdict():
    assert str(diagnose(Totals(), CPU)) == "nothing was served yet"


STARVED = totals(consumer_s=10, decode=5, waiting_s=5, bound=100)


@pytest.mark.parametrize(
    ("times", "change", "advice"),
    [
        (STARVED, {}, "two more decode threads or GPU decode"),
        (STARVED, {"num_threads": 1}, "one more decode thread or GPU decode"),
        (STARVED, {"num_processors": 5}, "one more decode thread, though 5 processors are too few: GPU decode"),
        (STARVED, {"num_processors": 4}, "all 4 processors decode already: GPU decode, or smaller images"),
        (STARVED, {"decoder": "pillow"}, "two more decode threads or decode='cpu'"),
        (STARVED, {"decoder": "gpu-window"}, "compare decode='cpu', or store smaller images"),
        (STARVED, {"decoder": None}, "larger batches"),
        (STARVED, {"is_shared": True}, "the jobs of the decode group decode in turn"),
        (totals(consumer_s=10, decode=5, waiting_s=5, bound=20), {}, "prefetch=4"),
        (totals(consumer_s=10, origin=5), {"has_cache": False}, "cache=Cache(FOLDER)"),
        (totals(consumer_s=10, origin=5), {}, "datasvc stage"),
    ],
)
def test_advice_fits_what_there_is(times, change, advice):
    assert advice in diagnose(times, dataclasses.replace(CPU, **change)).advice

from datasvc.trainer.engine.negotiation.negotiation import StallWatch
from datasvc.trainer.engine.negotiation.requests import Key

GRAD = Key(0, "grad")


def test_an_operation_is_reported_with_its_missing_ranks_once_per_period():
    watch = StallWatch(60.0)
    missing = {GRAD: (1, 3)}
    assert watch.check(100.0, missing)[0] == []
    assert watch.check(159.9, missing)[0] == []
    (stalled,) = watch.check(160.0, missing)[0]
    assert (stalled.key, stalled.ranks, stalled.waited_s) == (GRAD, (1, 3), 60.0)
    assert stalled.describe() == "'grad' has waited 60 s for ranks 1, 3, which did not submit it"
    assert watch.check(161.0, missing)[0] == []
    (stalled,) = watch.check(220.0, {GRAD: (3,)})[0]
    assert stalled.describe() == "'grad' has waited 120 s for rank 3, which did not submit it"


def test_the_wait_of_a_later_operation_of_the_same_name_starts_at_zero():
    watch = StallWatch(60.0)
    watch.check(0.0, {GRAD: (1,)})
    watch.check(59.0, {})
    assert watch.check(60.0, {GRAD: (1,)})[0] == []
    assert watch.check(119.0, {GRAD: (1,)})[0] == []
    assert len(watch.check(120.0, {GRAD: (1,)})[0]) == 1


def test_no_period_means_no_warning():
    watch = StallWatch(0.0)
    watch.check(0.0, {GRAD: (1,)})
    assert watch.check(1e9, {GRAD: (1,)})[0] == []


def test_a_shutdown_time_ends_the_job_with_the_operation_and_the_ranks():
    watch = StallWatch(0.0, shutdown_s=90.0)
    assert watch.check(0.0, {Key(3, "grad"): (1,)})[1] == ""
    assert watch.check(89.0, {Key(3, "grad"): (1,)})[1] == ""
    failure = watch.check(90.0, {Key(3, "grad"): (1,)})[1]
    assert failure.startswith("'grad' of process set 3 has waited 90 s for rank 1")

from trainer.engine.stall import StallWatch


def test_an_operation_is_reported_with_its_missing_ranks_once_per_period():
    watch = StallWatch(60.0)
    missing = {"grad": (1, 3)}
    assert watch.check(100.0, missing) == []
    assert watch.check(159.9, missing) == []
    assert watch.check(160.0, missing) == ["'grad' has waited 60 s for ranks 1, 3, which did not submit it"]
    assert watch.check(161.0, missing) == []
    assert watch.check(220.0, {"grad": (3,)}) == ["'grad' has waited 120 s for rank 3, which did not submit it"]


def test_an_operation_that_completed_starts_anew_under_the_same_name():
    watch = StallWatch(60.0)
    watch.check(0.0, {"grad": (1,)})
    watch.check(59.0, {})
    assert watch.check(60.0, {"grad": (1,)}) == []
    assert watch.check(119.0, {"grad": (1,)}) == []
    assert len(watch.check(120.0, {"grad": (1,)})) == 1


def test_no_period_means_no_warning():
    watch = StallWatch(0.0)
    watch.check(0.0, {"grad": (1,)})
    assert watch.check(1e9, {"grad": (1,)}) == []

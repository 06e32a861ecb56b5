"""Numbers that are said to be those of a run, in lists, on its page and in its advice."""

import pytest
import torch

import datasvc
from datasvc.drawing import ChartSeries, line_chart
from datasvc.loaders.profiling.bottleneck import Resources, diagnose
from datasvc.loaders.profiling.report import Report
from datasvc.loaders.profiling.step_times import Stage, Totals
from datasvc.runs import RunLog, list_runs, read_run


@pytest.fixture
def repository(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True).repository


def test_a_complete_run_that_is_started_again_keeps_its_numbers_in_every_list(repository):
    """G-Research/fasttrackml#655, n-orlov/ralphd#30: a list and the page of a continued run say different things."""
    with RunLog.open(repository, "net") as first:
        for step in (1, 2):
            first.report("step", step=step, loss=1.0 / step, progress=step / 2)
            first.report("checkpoint", version=f"net@{step}", step=step)
        first.report("stall", step=2, wait_s=3.0)
    with RunLog.open(repository, "net", run_id=first.id, parent="net@2"):
        pass  # nothing is left to train
    (run,) = list_runs(repository, "net")
    assert (run.num_attempts, run.state, run.step, run.latest["loss"]) == (2, "finished", 2, 0.5)
    assert (list(run.versions), run.num_stalls) == (["net@1", "net@2"], 1)
    history = read_run(repository, "net", first.id)
    assert history.versions == ["net@1", "net@2"]


def test_a_version_that_was_saved_just_before_a_kill_is_one_of_the_run(repository):
    """G-Research/fasttrackml#655: the log ends before the commit that it was killed after."""
    with RunLog.open(repository, "net") as first:
        first.report("checkpoint", version="net@1", step=1)
    with RunLog.open(repository, "net", run_id=first.id, parent="net@2") as second:
        second.report("checkpoint", version="net@3", step=3)
    assert read_run(repository, "net", first.id).versions == ["net@1", "net@2", "net@3"]
    assert list(list_runs(repository, "net")[0].versions) == ["net@1", "net@2", "net@3"]


def test_all_versions_that_were_saved_before_a_kill_are_those_of_the_run(tmp_path):
    """G-Research/fasttrackml#655: several versions were committed after the last part of the log."""
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.models.save("net", {"w": torch.zeros(1)}, step=0)  # of another run, or of none
    with RunLog.open(repo.repository, "net", parent="net@1") as first:
        for step in (1, 2, 3, 4):
            repo.models.save("net", {"w": torch.zeros(1)}, step=step, parent=f"net@{step}", run=first.ref)
        first.report("checkpoint", version="net@2", step=1)
    with RunLog.open(repo.repository, "net", run_id=first.id, parent="net@5") as second:
        second.report("checkpoint", version="net@6", step=5)
    saved = [f"net@{number}" for number in (2, 3, 4, 5, 6)]
    history = read_run(repo.repository, "net", first.id)
    assert history.versions == saved
    assert list(list_runs(repo.repository, "net")[0].versions) == saved
    marked = [event.facts["step"] for event in history.events if event.event == "checkpoint"]
    assert sorted(marked) == [1, 2, 3, 4, 5]  # the curves have a mark of each


def totals(**blocked_s):
    blocked = {Stage[name.upper()]: value for name, value in blocked_s.items()}
    return Totals(
        num_steps=100, num_samples=3200, wait_s=sum(blocked.values()), consumer_s=10.0, blocked_s=blocked,
        beside_s={Stage.DECODE: 1e-3}, num_beside={Stage.DECODE: 1}, waiting_s={}, num_bound_steps=0,
    )  # fmt: skip


def test_the_rates_of_the_advice_are_those_of_all_ranks_as_the_curve_of_the_run(repository):
    """meta-pytorch/torcheval#156, tensorflow/benchmarks#84: throughput of one process beside that of all."""
    found = diagnose(totals(read=2.0), Resources())
    report = Report(totals(read=2.0), found, wait_p50_s=0, wait_p95_s=0, wait_max_s=0, longest=())
    facts = report.of_all_ranks(4).to_dict()
    assert (facts["offered"], facts["asked"]) == (4 * found.offered, 4 * found.asked)
    assert f"{4 * found.offered:,.0f} samples/s offered" in facts["verdict"]


def test_a_headroom_without_meaning_is_given_as_a_bound():
    """instructlab/training#392: a number with more digits than it was measured with."""
    assert ", more than 1,000% headroom;" in str(diagnose(totals(read=0.01), Resources()))


def test_a_chart_of_one_step_has_no_tick_at_steps_that_were_not_taken():
    """novus/nvd3#947: the ticks of a chart with a single point."""
    drawn = str(line_chart([ChartSeries("loss", [8], [0.5], "c0")], title="loss"))
    assert ">8<" in drawn
    assert ">9<" not in drawn

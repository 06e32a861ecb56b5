"""A signal of a run: the distribution of its last epoch, and the samples with the largest values."""

from __future__ import annotations

from typing import Final

from datasvc.drawing import HistogramBin, histogram, histogram_table
from datasvc.models.provenance.signal_summary import SignalSummary, summarize_signal
from datasvc.shards.query.sample_reader import SampleSummary
from datasvc.ui.pages.histogram_charts import CHART_WIDTH
from datasvc.ui.web.links import run_link, runs_link, signal_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.seen_faults import Failures
from datasvc.ui.web.site import Site

_SHOWN_SAMPLES: Final = 24
_MAX_SAMPLES: Final = 1000
_MAX_VALUES: Final = 2_000_000  # of an epoch; they take some 100 MB


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the page of a signal; `data` selects one of several splits, `n` is the number of samples."""
    run, signal = f"{parts['name']}/{parts['id']}", parts["signal"]
    here, data = signal_link(run, signal), query.text("data")
    count = query.number("n", _SHOWN_SAMPLES, low=1, high=_MAX_SAMPLES)
    found = summarize_signal(site.repo.repository, run, signal, data=data, count=count, max_values=_MAX_VALUES)
    bins = [HistogramBin(*each) for each in found.bins]
    title = f"{signal} in epoch {found.epoch}"
    failures = Failures(site.faults, here)
    samples: list[SampleSummary] = []
    image_columns: list[str] = []
    with failures.noted():
        samples, image_columns = _read_samples(site, found)
    options = {"--data": data, "-n": str(count)}
    return Page(
        template="signal.html",
        title=f"{signal}: {run}",
        section="runs",
        crumbs=(Crumb("Runs", runs_link()), Crumb(run, run_link(parts["name"], parts["id"])), Crumb(signal, here)),
        problems=tuple(failures.problems()),
        panels={
            "signal": Panel(
                found.to_json(),
                site.command("runs", "signal", run, signal, "--json", options=options),
                f"{site.python('runs.signal_summary', run, signal, data=data, count=count)}.to_json()",
            )
        },
        view={
            "site": site,
            "run": run,
            "here": here,
            "found": found,
            "split": found.data.rpartition("/")[2],
            "samples": [(sample, each.value) for sample, each in zip(samples, found.largest, strict=False)],
            "image_columns": image_columns,
            "picture": histogram(bins, title=title, width=CHART_WIDTH, count_unit="values") if bins else None,
            "table": histogram_table(bins, title=title, count_unit="values") if bins else None,
            "more": min(4 * count, _MAX_SAMPLES) if count == len(found.largest) and count < _MAX_SAMPLES else None,
        },
    )


def _read_samples(site: Site, found: SignalSummary) -> tuple[list[SampleSummary], list[str]]:
    """Return the samples with the largest values, and the names of their columns of images."""
    dataset = site.splits.version(site.repo.repository, found.ref)
    samples = site.splits.samples(dataset, found.data.rpartition("/")[2])
    return samples.summaries([each.number for each in found.largest]), samples.image_columns

"""What loaders deliver, for a notebook: batches, the report of their time, the forecast of a cache, and the audit."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.drawing import (
    Markup,
    NamedBar,
    TableColumn,
    bar_chart,
    element,
    facts_table,
    figure,
    folded,
    html_table,
    markup,
    standalone,
)
from datasvc.ledger.audit_text import describe_conclusion
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from datasvc.ledger.audit import Audit
    from datasvc.loaders.decode.pixels import Pixels
    from datasvc.loaders.images.image_batch import BatchDisplay, ImageBatch
    from datasvc.loaders.profiling.report import Report
    from datasvc.loaders.tokens.token_decoder import TokenBatch
    from datasvc.planning.cache import Forecast

_MAX_IMAGES: Final = 64
_MAX_SIDE: Final = 128  # of a shown picture, in pixels
_MAX_BLOCKS: Final = 8
_MAX_TOKENS: Final = 16
_TIME: Final = "ms per step"
_GB: Final = 1e9
_AUDIT_COLUMNS: Final = (
    "epoch",
    "verdict",
    "served",
    "masked",
    "dropped",
    "padded",
    "never",
    "more than once",
    "again",
)


def image_batch_html(batch: ImageBatch[Any]) -> Markup:
    """Return the first 64 images of a batch with class name or label and position; tensors are copied from a GPU."""
    count = len(batch.positions)
    shown = min(count, _MAX_IMAGES)
    images = to_levels(to_array(batch.images[:shown]), batch.display)
    labels = [None] * shown if batch.labels is None else to_array(batch.labels[:shown]).tolist()
    mask = to_array(batch.mask[:shown]).tolist()
    figures = [
        figure(
            _png(images[index]),
            [
                _label(labels[index], batch.display),
                f"position {batch.positions[index]:,}",
                "" if mask[index] else "masked",
            ],
            title=batch.bad.get(index, f"image {index} of the batch"),
            is_problem=not mask[index],
        )
        for index in range(shown)
    ]
    facts: dict[str, str | float | None] = {
        "batch of images": f"{count:,}" + (f", the first {shown} are shown" if shown < count else ""),
        "epoch": batch.epoch,
        "shape": f"{tuple(batch.images.shape)}, {batch.images.dtype}",
        "device": str(getattr(batch.images, "device", "cpu")),
    }
    return standalone(facts_table(facts), markup(figures))


def to_array(values: Any) -> npt.NDArray[Any]:
    """Return a tensor on any device, or an array, as a NumPy array; bfloat16 as float32."""
    if isinstance(values, np.ndarray):
        return values
    tensor = values.detach().cpu()
    return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())


def to_levels(images: npt.NDArray[Any], display: BatchDisplay | None) -> Pixels:
    """Return images as `uint8[n, height, width, 3]`.

    Args:
        images: of the type and layout of the loader.
        display: how they were normalised; None: the lowest value of the batch becomes 0, and the highest 255.
    """
    is_planar = images.shape[1] in {1, 3} if display is None else display.pixels.layout == "NCHW"
    last = np.moveaxis(images, 1, -1) if is_planar else images
    if last.dtype == np.uint8:
        return last
    levels = np.nan_to_num(last.astype(np.float32))
    if display is not None:
        levels = (levels - display.pixels.shift) / display.pixels.scale
    elif levels.size:
        low, high = float(levels.min()), float(levels.max())
        levels = (levels - low) * (255 / (high - low or 1))
    return np.clip(np.rint(levels), 0, 255).astype(np.uint8)


def _label(label: int | None, display: BatchDisplay | None) -> str:
    if label is None:
        return ""
    classes = () if display is None else display.classes
    return classes[label] if 0 <= label < len(classes) else f"label {label}"


def _png(image: Pixels) -> bytes:
    from PIL import Image  # for a picture only: a loader may run without it

    file = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3))))
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    picture.save(file, "PNG")
    return file.getvalue()


def token_batch_html(batch: TokenBatch[Any]) -> Markup:
    """Return the first tokens of the first samples, with positions and lengths."""
    count, block = len(batch.positions), int(batch.tokens.shape[1])
    facts = {"batch of token blocks": count, "tokens of a block": block, "epoch": batch.epoch}
    rows = [
        (
            int(batch.positions[index]),
            int(batch.length[index]),
            " ".join(map(str, batch.tokens[index][:_MAX_TOKENS].tolist())) + (" …" if block > _MAX_TOKENS else ""),
            "" if batch.mask[index] else "padding",
        )
        for index in range(min(count, _MAX_BLOCKS))
    ]
    return standalone(facts_table(facts), html_table(["position", "tokens", "first tokens", "state"], rows))


def report_html(report: Report) -> Markup:
    """Return the bottleneck in words, the time of a step by stage, and the longest waits."""
    verdict = element("p", str(report.bottleneck))
    if not report.totals.num_steps:
        return standalone(verdict)
    times = stage_times_ms(report)
    bars = bar_chart(
        [NamedBar(stage, time_ms) for stage, time_ms in times.items()], title="time of a step", unit=_TIME
    )
    beside = {stage.value: seconds for stage, seconds in report.totals.beside_s.items()}
    names = [*times, *(stage for stage in beside if stage not in times)]
    table = html_table(
        ["stage", TableColumn(_TIME), TableColumn("other threads", "s")],
        [(name, times.get(name), beside.get(name)) for name in names],
        caption=f"{report.totals.num_steps:,} steps, {report.totals.num_samples:,} {report.bottleneck.unit}",
    )
    waits = html_table(
        ["step", TableColumn("wait", "s"), "longest stage"],
        [(wait.step, wait.wait_s, wait.stage.value) for wait in report.longest],
        caption=f"longest waits; the median is {report.wait_p50_s:.4g} s, 95 % are below {report.wait_p95_s:.4g} s",
    )
    return standalone(verdict, bars, folded("as a table", table), folded("longest waits", waits))


def plot_report(report: Report, *, ax: Axes | None = None) -> Axes:
    """Plot the time of a step by stage, see `Report.plot`."""
    from datasvc.views.plots import plot_stacks

    times = stage_times_ms(report)
    return plot_stacks(list(times), {_TIME: list(times.values())}, title=str(report.bottleneck), unit=_TIME, ax=ax)


def stage_times_ms(report: Report) -> dict[str, float]:
    """Return the mean time of a step inside the call for a batch by stage, and that of the consumer."""
    totals = report.totals
    seconds = {stage.value: blocked_s for stage, blocked_s in totals.blocked_s.items()} | {
        "consumer": totals.consumer_s
    }
    return {name: 1000 * value / max(totals.num_steps, 1) for name, value in seconds.items()}


def forecast_html(forecast: Forecast) -> Markup:
    """Return sizes, and the traffic of the first and of later epochs."""
    facts: dict[str, str | float | None] = {
        "samples": forecast.num_samples,
        "shards": forecast.num_shards,
        "data": format_size(forecast.data_bytes),
        "budget of a node": format_size(forecast.budget_bytes),
        "window of the order": format_size(forecast.window_bytes),
        "resident on a node": format_size(forecast.resident_bytes),
    }
    epochs = {"first": forecast.first_epoch, "each later one": forecast.later_epochs}
    rows = [
        (name, epoch.used_bytes, epoch.hit_bytes, epoch.peer_bytes, epoch.origin_bytes, epoch.starves)
        for name, epoch in epochs.items()
    ]
    columns = [TableColumn(name, "bytes") for name in ("read", "from own caches", "from peers", "from the origin")]
    return standalone(facts_table(facts), html_table(["epoch", *columns, "starves"], rows))


def plot_forecast(forecast: Forecast, *, ax: Axes | None = None) -> Axes:
    """Plot where the bytes of an epoch come from, see `Forecast.plot`."""
    from datasvc.views.plots import plot_stacks

    epochs = [forecast.first_epoch, forecast.later_epochs]
    parts = {
        "own caches": [epoch.hit_bytes / _GB for epoch in epochs],
        "peers": [epoch.peer_bytes / _GB for epoch in epochs],
        "origin": [epoch.origin_bytes / _GB for epoch in epochs],
    }
    return plot_stacks(["first epoch", "each later epoch"], parts, title="traffic of an epoch", unit="GB", ax=ax)


def audit_html(audit: Audit) -> Markup:
    """Return the verdict of each epoch with its counts, and what is wrong."""
    facts = {
        "audit of": audit.header.source,
        "result": "proven" if audit.is_proven else "not proven",
        "files": audit.num_files,
        "ranks": " → ".join(map(str, audit.world_sizes)),
    }
    rows = [
        (
            str(epoch.epoch),
            describe_conclusion(epoch),
            epoch.served,
            epoch.masked,
            epoch.dropped,
            epoch.padded,
            epoch.never.count,
            epoch.repeated.count,
            epoch.again,
        )
        for epoch in audit.epochs
    ]
    problems = [*audit.damage, *audit.disagreements, *(reason for epoch in audit.epochs for reason in epoch.reasons)]
    listed = [element("p", f"problem: {problem}") for problem in problems]
    return standalone(facts_table(facts), html_table(list(_AUDIT_COLUMNS), rows), *listed)

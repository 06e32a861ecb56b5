"""Rendering of the status of a node for `datasvc top`, as text or as tables on a terminal."""

from __future__ import annotations

import io
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from PIL import Image, ImageDraw
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from datasvc.cli.terminal.output import plain_text
from datasvc.cli.terminal.terminal_image import ImageProtocol, choose_protocol, encode_kitty, encode_sixel
from datasvc.drawing.colours import colour_values
from datasvc.errors import UnavailableError
from datasvc.printable import count_text, text_value
from datasvc.sizes import format_size

Status = Mapping[str, Any]
"""The status document of a node, or `{"cache": ...}` for a local cache without a server."""

# Label of a row of the traffic table, and name of the counter of bytes that the row shows.
_RATE_COUNTERS = (
    ("from origin", "origin_bytes"),
    ("from peers", "peer_bytes"),
    ("to peers", "served_bytes"),
    ("evicted", "evicted_bytes"),
)

_NUM_SHOWN_RATES = 24  # readings per sparkline, so that the table fits into 80 columns
_BARS = " " + "".join(map(chr, range(0x2581, 0x2589)))  # from one eighth of a block to a full block

_PICTURE_SIZE: Final = (640, 140)
_MARGIN: Final = 20
_NUM_LINES: Final = 9  # lines of text that the picture may cover: a line of a terminal has 16 pixels or more
_DELETE_KITTY: Final = "\x1b_Ga=d,q=2\x1b\\"  # pictures of earlier readings would stay


def watch(
    read_status: Callable[[], Status], *, interval_s: float, stop: threading.Event, console: Console | None = None
) -> None:
    """Read and draw the status at each interval, until interrupted or `stop` is set.

    If the node does not respond, the error is drawn instead, and the next interval tries again. A terminal that draws
    pixels has a picture of the traffic below the tables.
    """
    console = console or Console()
    protocol = choose_protocol(console)
    # Disable the automatic refresh of rich, because there is nothing new to draw between two readings. Ctrl-C is the
    # usual way to end the command, so it is not an error.
    with Live(console=console, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        previous: tuple[float, Status] | None = None  # time and status of the previous reading
        rates: deque[Mapping[str, float]] = deque(maxlen=_NUM_SHOWN_RATES)  # oldest first
        while not stop.is_set():
            now = time.monotonic()
            try:
                status = read_status()
            except UnavailableError as error:
                live.update(Text(text_value(str(error)), style="bold red"), refresh=True)
            else:
                if previous is not None and (latest := byte_rates(previous[1], status, now - previous[0])):
                    rates.append(latest)
                drawn = draw(status, rates)
                live.update(drawn, refresh=True)
                if rates:
                    labels = {name: text for text, name in _RATE_COUNTERS}
                    _show_below(console, len(console.render_lines(drawn)), draw_traffic(rates, labels), protocol)
                previous = now, status
            stop.wait(interval_s)


def status_text(status: Status) -> str:
    """Return the status of a node as text without colours."""
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(draw(status, ()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def byte_rates(earlier: Status, later: Status, elapsed_s: float) -> dict[str, float]:
    """Return bytes per second for each byte counter, from two readings of the status `elapsed_s` apart."""
    if elapsed_s <= 0:
        return {}
    old, new = earlier["cache"]["counters"], later["cache"]["counters"]
    rates: dict[str, float] = {}
    for _, name in _RATE_COUNTERS:
        # A counter restarts at 0 when its process restarts, so the difference may be negative.
        rates[name] = max(0, new.get(name, 0) - old.get(name, 0)) / elapsed_s
    return rates


def draw(status: Status, rates: Sequence[Mapping[str, float]]) -> RenderableType:
    """Return the status of a node as an object that rich can print. `rates`: of `byte_rates`, oldest first."""
    return Group(*_parts(status, rates))


def _parts(status: Status, rates: Sequence[Mapping[str, float]]) -> Iterator[RenderableType]:
    cache = status["cache"]
    yield Text(f"cache {text_value(cache['folder'])}", style="bold")
    yield _space(cache)
    yield _traffic(cache["counters"], rates)
    if "serving" in status:
        serving = status["serving"]
        yield Text(
            f"serving: {serving['num_streams']} streams, {serving['num_connections']} of "
            f"{count_text(serving['max_connections'], 'connection')}, "
            f"{count_text(serving['num_fetches'], 'object')} being fetched for peers, "
            f"{serving['num_broken']} incomplete responses"
        )
    if "decoding" in status:
        decoding = status["decoding"]
        yield Text(f"decoding for loaders: {decoding['num_images']} images, {decoding['num_threads']} threads")
    yield from _tables(status)


def _space(cache: Status) -> RenderableType:
    used = cache["resident_bytes"] + cache["reserved_bytes"] + cache["quarantined_bytes"]
    table = Table.grid(padding=(0, 2))
    table.add_row(
        ProgressBar(total=max(1, cache["limit_bytes"]), completed=used, width=40),
        f"{format_size(used)} of {format_size(cache['limit_bytes'])}",
    )
    details = [f"{format_size(cache['resident_bytes'])} resident in {count_text(cache['num_resident'], 'object')}"]
    for name, text in (
        ("reserved_bytes", "being fetched"),
        ("held_bytes", "in use by jobs"),
        ("pinned_bytes", "pinned"),
        ("quarantined_bytes", "quarantined"),
    ):
        if cache[name]:
            details.append(f"{format_size(cache[name])} {text}")
    return Group(table, Text(", ".join(details)))


def _traffic(counters: Status, rates: Sequence[Mapping[str, float]]) -> RenderableType:
    hits, misses = counters.get("hits", 0), counters.get("misses", 0)
    ratio = f"{hits / (hits + misses):.1%}" if hits + misses else "none yet"
    table = _table(
        "traffic", "total", *(("now", f"last {count_text(len(rates), 'reading')}", "highest") if rates else ())
    )
    for text, name in _RATE_COUNTERS:
        shown = [each[name] for each in rates]
        now = (f"{format_size(shown[-1])}/s", sparkline(shown), f"{format_size(max(shown))}/s") if shown else ()
        table.add_row(text, format_size(counters.get(name, 0)), *now)
    bad = f"{counters.get('corrupt', 0)} corrupt objects, {counters.get('refused', 0)} refused for lack of space"
    return Group(Text(f"hits: {ratio} of {hits + misses}; {bad}"), table)


def sparkline(values: Sequence[float]) -> str:
    """Return one bar per value, from 0 to the highest value; a space for 0."""
    highest = max(values, default=0)
    # Round up: a rate above 0 is never shown as none.
    levels = [math.ceil(value / highest * (len(_BARS) - 1)) if highest else 0 for value in values]
    return "".join(_BARS[level] for level in levels)


def _tables(status: Status) -> Iterator[RenderableType]:
    cache = status["cache"]
    if status.get("jobs"):
        table = _table("staging", "split", "state", "done", "total", "hits", "from origin", "from peers")
        for job in status["jobs"]:
            # In the order of the last three columns.
            source_bytes = (job["bytes"][source] for source in ("resident", "origin", "peer"))
            sizes = map(format_size, (job["done_bytes"], job["total_bytes"], *source_bytes))
            table.add_row(*map(plain_text, (job["ref"], job["split"] or "all", job["state"], *sizes)))
        yield table
    if status.get("peers"):
        table = _table("peer", "ok", "missing", "failed", "corrupt", "bytes")
        for url, peer in sorted(status["peers"].items()):
            # The column "corrupt" shows `num_lying`, the number of objects with a wrong digest.
            counts = (peer[f"num_{name}"] for name in ("ok", "missing", "failed", "lying"))
            table.add_row(plain_text(url), *map(str, counts), format_size(peer["bytes_received"]))
        yield table
    if cache["jobs"]:
        table = _table("process", "bytes read", "description")
        # A process may have several jobs with one description, such as one per split: they are one row.
        clock_bytes: Counter[tuple[str, str]] = Counter()
        for job in cache["jobs"]:
            process = str(job["lease_id"]).partition("-")[0]  # the id of a lease begins with the id of its process
            clock_bytes[process, job["note"] or "-"] += job["clock_bytes"]
        for (process, note), count in clock_bytes.items():
            table.add_row(plain_text(process), format_size(count), plain_text(note))
        yield table
    # For a single tenant, the first lines already show these numbers.
    if len(cache["tenants"]) > 1:
        table = _table("tenant", "used", "guaranteed", "maximum")
        for name, usage in sorted(cache["tenants"].items()):
            maximum_bytes = usage["maximum_bytes"]
            sizes = map(format_size, (usage["used_bytes"], usage["guaranteed_bytes"]))
            table.add_row(plain_text(name), *sizes, "budget" if maximum_bytes is None else format_size(maximum_bytes))
        yield table


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))


def draw_traffic(rates: Sequence[Mapping[str, float]], labels: Mapping[str, str]) -> Image.Image:
    """Return a line for each counter over the readings, oldest on the left; the top is the highest rate.

    Args:
        rates: bytes per second by counter, at least one reading.
        labels: text of each counter that is drawn.
    """
    image = Image.new("RGB", _PICTURE_SIZE, "#16191d")
    canvas = ImageDraw.Draw(image)
    width, height = _PICTURE_SIZE[0] - 2 * _MARGIN, _PICTURE_SIZE[1] - 2 * _MARGIN
    highest = max(reading[name] for reading in rates for name in labels)
    canvas.text((_MARGIN, 4), f"up to {format_size(highest)}/s", fill="#e6e8ea")
    for number, (name, label) in enumerate(labels.items()):
        colour = colour_values(f"c{number}")[1]
        points = [
            (
                _MARGIN + width * index / max(1, len(rates) - 1),
                _MARGIN + height * (1 - reading[name] / highest if highest else 1),
            )
            for index, reading in enumerate(rates)
        ]
        canvas.line(points if len(points) > 1 else 2 * points, fill=colour, width=2)
        canvas.text((_MARGIN + 140 * number, _PICTURE_SIZE[1] - _MARGIN + 4), label, fill=colour)
    return image


def _show_below(console: Console, num_lines: int, image: Image.Image, protocol: ImageProtocol) -> None:
    """Draw a picture below the first `num_lines` lines of a screen, if it draws pixels and has room."""
    if protocol not in {"kitty", "sixel"} or num_lines + _NUM_LINES > console.height:
        return
    data = _DELETE_KITTY + encode_kitty(image) if protocol == "kitty" else encode_sixel(image)
    console.file.write(f"\x1b[{num_lines + 1};1H{data}")
    console.file.flush()

"""Turns the values of a page into HTML. Texts are escaped by Jinja2, and control characters are made visible."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from datasvc.models.versions.entry_fields import tree_leaves
from datasvc.planning.cost import format_money
from datasvc.printable import count_text, escape_controls, text_value
from datasvc.sizes import format_size
from datasvc.ui.web import links
from datasvc.ui.web.page import Page, Problem
from datasvc.views.view import FactPart

NAVIGATION = (
    ("home", "Home", "/"),
    ("datasets", "Data sets", "/datasets"),
    ("models", "Models", "/models"),
    ("runs", "Runs", "/runs"),
    ("cluster", "Cluster", "/cluster"),
    ("planner", "Planner", "/planner"),
)
_SHORT_DIGEST_CHARS = 12
_UNITS = ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"), (60, "minute"))


def make_environment() -> Environment:
    """Return the templates, with the filters and functions that they use."""
    environment = Environment(
        loader=PackageLoader("datasvc.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": ago,
        "count": count,
        "digest": digest,
        "json_text": json_text,
        "leaves": partial(tree_leaves, path=""),
        "lines": lines,
        "metric": metric,
        "money": format_money,
        "number": number,
        "exact": text_value,
        "part": show_part,
        "size": size,
        "words": words,
    }
    environment.globals |= {
        "navigation": NAVIGATION,
        "fact": fact,
        **{name: getattr(links, name) for name in dir(links) if name.endswith(("_link", "with_query"))},
    }
    return environment


def render(environment: Environment, page: Page, *, address: str, api_address: str, search: str = "") -> str:
    """Return the HTML of a page.

    Args:
        environment: templates.
        page: values of the page.
        address: path and query of the page.
        api_address: path and query of its JSON twin.
        search: text of the search box.
    """
    return environment.get_template(page.template).render(
        page=page, address=address, api_address=api_address, search=search, **page.view
    )


def render_problems(environment: Environment, problems: Sequence[Problem]) -> str:
    """Return the HTML of a list of problems, for a page that was rendered before."""
    return str(environment.get_template("macros.html").make_module().problems(problems))  # type: ignore[attr-defined]


def ago(time: str | float | None, now: datetime | None = None) -> Markup | str:
    """Return a time relative to now, with the exact time in its title; "-" for None.

    Args:
        time: time as in log entries (ISO 8601), or seconds since 1970.
        now: current time; default: that of the clock.
    """
    if time is None:
        return "-"
    try:
        moment = datetime.fromtimestamp(time, UTC) if isinstance(time, (int, float)) else datetime.fromisoformat(time)
    except (ValueError, OverflowError, OSError):
        return escape_controls(str(time))
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    exact = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        moment.astimezone(UTC).isoformat(), exact, _relative(seconds)
    )


def _relative(seconds: float) -> str:
    for unit_s, unit in _UNITS:
        if abs(seconds) >= unit_s:
            count = count_text(int(abs(seconds) // unit_s), unit)
            return f"{count} ago" if seconds > 0 else f"in {count}"
    return "now" if abs(seconds) < 1 else f"{seconds:.0f} s ago" if seconds > 0 else f"in {-seconds:.0f} s"


def number(value: float | None) -> str:
    """Return a number with separators of thousands; "-" for None."""
    return "-" if value is None else f"{value:,}"


def count(value: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, such as "1,797 samples"."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def metric(value: object) -> str:
    """Return a value of a metric as short text. A setting is shown as it was given: see the filter `exact`."""
    if isinstance(value, bool) or not isinstance(value, float):
        return json_text(value) if isinstance(value, (dict, list, bool)) or value is None else str(value)
    return f"{value:.4g}"


def fact(name: str, value: object) -> Markup | str:
    """Return a fact of a log as text; names of numbers end in their units: "wait 2.5 s" for `wait_s`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} {metric(value)}"
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s')} {metric(value)}/s"
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {metric(value)} s"
    if name.endswith("_bytes") and value >= 0 and math.isfinite(value):
        return Markup("{} {}").format(escape_controls(name.removesuffix("_bytes")), size(value))
    return f"{name} {metric(value)}"


def size(value: float | None) -> Markup | str:
    """Return a number of bytes as text, such as "1.50 GB", with the exact number in its title; "-" for None."""
    if value is None:
        return "-"
    return Markup('<span title="{} bytes">{}</span>').format(f"{value:,}", format_size(value))


def digest(value: str) -> Markup:
    """Return the first characters of a digest; a click, or Enter where it has the focus, copies it whole."""
    algorithm, colon, digits = str(value).rpartition(":")
    short = f"{algorithm}{colon}{digits[:_SHORT_DIGEST_CHARS]}"
    return Markup('<code class="digest" tabindex="0" title="{}" data-copy="{}">{}</code>').format(value, value, short)


def show_part(part: FactPart) -> Markup | str:
    """Return a part of a fact: a time relative to now, a size with its bytes, a reference as a link."""
    formats: dict[str, Callable[[Any], Markup | str]] = {"time": ago, "bytes": size, "digest": digest}
    if part.kind in formats:
        return formats[part.kind](part.value)
    of_kinds = {"datasets": links.dataset_link, "models": links.model_link, "runs": links.run_ref_link}
    address = of_kinds[part.kind](str(part.value)) if part.kind in of_kinds else None
    return str(part) if address is None else Markup('<a href="{}">{}</a>').format(address, str(part))


def words(name: str) -> Markup:
    """Return a name that a narrow column breaks between its parts, such as "config." and "learning_", and "rate"."""
    return Markup("<wbr>").join(re.split(r"(?<=[._/])", escape_controls(name)))


def json_text(value: object) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


def lines(text: str) -> Markup:
    """Return a text of several lines; its other control characters are made visible."""
    return Markup("\n").join(escape_controls(line.replace("\t", "    ")) for line in text.split("\n"))


def _finalize(value: object) -> object:
    """Make control characters of texts visible, such as those that change the direction of writing."""
    # Markup of filters and of `datasvc.drawing` has `__html__`; its texts are escaped already.
    return escape_controls(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

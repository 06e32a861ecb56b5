"""Two model versions side by side: values that differ, and on request the change of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from datasvc.drawing import Markup, heat_map
from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.registry.compare import compare_versions
from datasvc.models.registry.diff import ModelDifference, diff
from datasvc.models.registry.registry import describe_model
from datasvc.models.tensors.tensor_table import read_table
from datasvc.repository import Digest
from datasvc.ui.web.links import compare_link, with_query
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Query, RawResponse
from datasvc.ui.web.site import Site

# The tables of more tensors are megabytes; they are read only on request.
_MAX_TENSORS: Final = 20_000
# Above this number of columns, a heat map has a row for each tensor instead of one for each layer.
_MAX_COLUMNS: Final = 16
_MAX_MAPS: Final = 6
_MIN_CELL: Final = 80
_MAX_CELL: Final = 140
_LOG_RATIO: Final = 20  # of the largest and the smallest change


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the comparison of the versions in the path, or of `a` and `b` in the query; without both, the form."""
    first, second = (parts.get(name) or query.text(name) for name in ("a", "b"))
    if first is None or second is None:
        return _page((first, second), {}, {})
    repository = site.repo.repository
    versions = [describe_model(repository, ref) for ref in (first, second)]
    names = str(versions[0]), str(versions[1])
    if names[0] == names[1]:
        raise ConfigError(f"{first} and {second} are the same version, {names[0]}; give two versions to compare")
    command = site.command("models", "compare", *names, "--json")
    panels = {
        "values": Panel(
            asdict(compare_versions(repository, names)), command, site.python("models.compare", list(names))
        )
    }
    link = compare_link(*names)
    view: dict[str, Any] = {
        "swap_link": compare_link(*reversed(names)),
        "with_tensors": with_query(link, query, a=None, b=None, tensors=1),
        "norms_link": with_query(link, query, a=None, b=None, norms=1),
        "num_tensors": max(version.entry["num_tensors"] for version in versions),
        "removed": [str(version) for version in versions if version.removed],
        "maps": [],
    }
    is_small = view["num_tensors"] <= _MAX_TENSORS
    if not view["removed"] and (is_small or query.text("tensors") or query.text("norms")):
        with_norms = query.text("norms") is not None
        try:
            difference = site.changes.diff(*names) if with_norms else diff(repository, *names, norms=False)
        except DatasvcError as error:
            view["tensors_fault"] = str(error)
        else:
            flag = ("--norms" if with_norms else "--no-norms", "--json")
            panels["tensors"] = Panel(
                difference.to_dict(),
                site.command("models", "diff", *names, *flag),
                site.python("models.diff", *names, norms=with_norms),
            )
            view["maps"] = draw_changes(difference)
            view["changes"] = sorted(difference.tensors.changes, key=lambda change: -(change.relative or 0.0))
            view["bytes_to_read"] = _bytes_to_read(site, versions[1].tensors, difference.tensors.changed)
    return _page(names, panels, view)


def _page(names: tuple[str | None, str | None], panels: Mapping[str, Panel], view: Mapping[str, Any]) -> Page:
    first, second = names
    crumbs = [Crumb("Models", "/models"), Crumb("Compare", "/compare")]
    title = "Compare versions"
    if first and second:
        title = f"{first} and {second}"
        crumbs.append(Crumb(f"{first} {second}", compare_link(first, second)))
    return Page(
        template="compare.html",
        title=title,
        section="models",
        crumbs=tuple(crumbs),
        panels=panels,
        view={"first": first, "second": second, "tensors_fault": None, "change_text": describe_change, **view},
    )


def _bytes_to_read(site: Site, table: Digest, changed: Sequence[str]) -> int:
    """Return the bytes in memory of the changed tensors of one version."""
    names = frozenset(changed)
    records = read_table(site.repo.repository.objects, table) if names else ()
    return sum(record.nbytes for record in records if record.name in names)


def draw_changes(difference: ModelDifference) -> list[tuple[str, Markup]]:
    """Return a heat map of the relative change of each layer, for each part of the state, such as "model".

    A layer is what the name of a tensor begins with; its columns are the last parts, such as "weight" and "bias".
    """
    by_part: dict[str, dict[str, float | None]] = {}
    for change in difference.tensors.changes:
        by_part.setdefault(change.name.partition(".")[0], {})[change.name] = change.relative
    # The weights are asked for first; the state of an optimizer follows them.
    ordered = sorted(by_part.items(), key=lambda item: (item[0].startswith("optim"), item[0]))
    return [(part, _heat_map(part, values)) for part, values in ordered[:_MAX_MAPS]]


def _heat_map(part: str, relative: Mapping[str, float | None]) -> Markup:
    columns = list(dict.fromkeys(name.rpartition(".")[2] for name in relative))
    title = f"relative change of {part}"
    if len(columns) > _MAX_COLUMNS:
        columns = ["change"]
        layers = sorted(relative, key=_natural_order)
        values = [[relative[name]] for name in layers]
    else:
        layers = sorted({name.rpartition(".")[0] or name for name in relative}, key=_natural_order)
        values = [[relative.get(f"{layer}.{column}", relative.get(layer)) for column in columns] for layer in layers]
    known = [value for row in values for value in row if value]
    return heat_map(
        layers,
        columns,
        values,
        title=title,
        cell_width=min(max(_MIN_CELL, *(len(column) * 8 + 8 for column in columns)), _MAX_CELL),
        # Small changes beside large ones are told apart.
        log_scale=bool(known) and max(known) > _LOG_RATIO * min(known),
        with_numbers=True,
        with_title=False,  # the page has a heading for each part
    )


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return what sorts layer 2 before layer 10."""
    return [(int(text), "") if text.isdecimal() else (0, text) for text in re.split(r"([0-9]{1,9})", name)]


def describe_change(first: object, second: object) -> str:
    """Return by how much a number has changed, such as "+24" or "-0.01 (-3.2 %)"; "" for what is no number."""
    numbers = [value for value in (first, second) if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        return ""
    before, after = numbers
    change = after - before
    text = f"{change:+,}" if isinstance(change, int) else f"{change:+.4g}"
    return f"{text} ({100 * change / abs(before):+.3g} %)" if before else text

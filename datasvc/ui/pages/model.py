"""One model version: its history, its facts, how it is stored, how to restore it, and what retention would remove."""

from __future__ import annotations

from typing import Any, Final

from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.registry.registry import ModelVersion, describe_model, show_facts
from datasvc.models.registry.retention import RetentionPolicy, retain
from datasvc.models.registry.stored_size import measure_stored_size
from datasvc.models.versions.signing import list_signers
from datasvc.repository import Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import NameState
from datasvc.ui.pages.model_history import (
    AXES,
    NEWEST_IN_CHART,
    draw_versions,
    history_table,
    read_metric,
    read_page,
    versions_panel,
)
from datasvc.ui.web.links import model_link, with_query
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.views.models import describe

# The tensor table of more tensors is megabytes; it is read only on request.
_MAX_TENSORS: Final = 20_000
_MAX_DIFF_BYTES: Final = 256 << 10
_MODES: Final = ("", "max", "min")


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the version that the reference in the address resolves to."""
    repository = site.repo.repository
    version = describe_model(repository, parts["ref"])
    state = repository.state("models", version.name)
    resolved = Resolved("models", version.name, version.version)
    ref = str(version)
    history = read_page(site, version, state, query)
    chart = read_metric(site, version, state, query)
    stored, stored_reason = _stored(site, version, query)
    retention, retention_fault = _retention(site, version.name, query)
    panels = {
        "version": Panel(
            show_facts(repository, version),
            site.command("models", "show", ref, "--json"),
            site.python("models.describe", ref),
        ),
        "versions": versions_panel(site, version.name, history),
        **({"metric": chart.panel} if chart else {}),
        "stored": Panel(
            stored,
            site.command("models", "show", ref, "--stored", "--json"),
            f"{site.python('models.stored_size', ref)}.to_dict()",
        ),
        "signatures": Panel(
            list_signers(repository, resolved),
            site.command("models", "show", ref, "--signers", "--json"),
            site.python("models.signers", ref),
        ),
        **({"retention": retention} if retention else {}),
    }
    crumbs = (Crumb("Models", "/models"), Crumb(version.name, model_link(version.name)), Crumb(ref, model_link(ref)))
    path = model_link(parts["ref"])
    return Page(
        template="model.html",
        title=ref,
        section="models",
        crumbs=crumbs,
        panels=panels,
        problems=tuple(_problems(site, version, state)),
        view={
            "site": site,
            "ref": ref,
            "version": version,
            "facts": describe(version),
            "newest": state.living[-1] if state.living else None,
            "num_versions": len(state.versions),
            "num_removed": len(state.removed),
            "history": history,
            "history_table": history_table(history, query, path),
            "graph": draw_versions(history, version),
            "chart": chart,
            "chart_svg": chart.svg if chart else "",
            "axes": AXES,
            "num_in_chart": NEWEST_IN_CHART,
            "all_link": with_query(path, query, span="all"),
            "newest_link": with_query(path, query, span=None),
            "page_path": path,
            "page_link": with_query(path, query, page=None),
            "stored_link": with_query(path, query, stored=1),
            "stored_reason": stored_reason,
            "diff": _diff(site, version),
            "query": query,
            "retention_fault": retention_fault,
            "modes": _MODES,
            "earlier": f"{version.name}@{version.version - 1}" if version.version > 1 else None,
            "restore_command": site.command("models", "restore", ref, "FOLDER"),
            "restore_python": site.python("models.restore", ref),
        },
    )


def _problems(site: Site, version: ModelVersion, state: NameState) -> list[Problem]:
    counts = version.entry.get("num_nonfinite") or {}
    problems = []
    if counts:
        names = ", ".join(sorted(counts)[:5])
        problems.append(
            Problem(
                f"{version} has NaN or infinite elements in {len(counts)} of its tensors ({names}): its training "
                f"diverged or overflowed. {_way_out(site, version, state)}."
            )
        )
    return problems


def _way_out(site: Site, version: ModelVersion, state: NameState) -> str:
    """Return what to do about a version that is not finite."""
    earlier = [number for number in state.living if number < version.version][-NEWEST_IN_CHART:]
    entries = site.repo.repository.readable_entries("models", version.name, earlier)
    finite = [entry.number for entry in entries if not entry.content.get("num_nonfinite")]
    if finite:
        return f"Continue from {version.name}@{max(finite)}, the newest earlier version that has none"
    searched = "no earlier version that was searched is without them" if earlier else "there is no earlier one"
    return f"Start again, with other settings: {searched}"


def _stored(site: Site, version: ModelVersion, query: Query) -> tuple[dict[str, Any] | None, str | None]:
    """Return how the version is stored; or None, and why it is not known."""
    if version.removed:
        return None, "The version was removed, so gc may have deleted its bytes."
    if version.entry["num_tensors"] > _MAX_TENSORS and query.text("stored") is None:
        return None, "large"
    try:
        return measure_stored_size(site.repo.repository.objects, version.tensors).to_dict(), None
    except DatasvcError as error:
        return None, f"The tensor table cannot be read: {error}"


def _diff(site: Site, version: ModelVersion) -> str | None:
    """Return the stored local changes of the code; None if there are none, they are large or cannot be read."""
    digest = version.entry["code"].get("diff")
    if not digest:
        return None
    try:
        raw = site.repo.repository.objects.read(parse_digest(digest), _MAX_DIFF_BYTES)
    except DatasvcError:
        return None
    return raw.decode(errors="replace")


def _retention(site: Site, name: str, query: Query) -> tuple[Panel | None, str | None]:
    """Return what the policy in the address keeps and removes; or None, and what is wrong with the policy."""
    counts = {field: query.number(field, 0) or None for field in ("last", "best", "every", "every_steps")}
    metric, mode = query.text("keep_metric"), query.choice("mode", _MODES) or None
    if not any(counts.values()) and metric is None:
        return None, None
    options = {
        "--last": counts["last"],
        "--best": counts["best"],
        "--metric": metric,
        "--mode": mode,
        "--every": counts["every"],
        "--every-steps": counts["every_steps"],
    }
    try:
        policy = RetentionPolicy(
            counts["last"],
            counts["best"],
            metric,
            "max" if mode == "max" else "min" if mode == "min" else None,
            counts["every"],
            counts["every_steps"],
        )
        _, plan = retain(site.repo.repository, name, policy)
    except ConfigError as error:
        return None, str(error)
    texts = {option: None if value is None else str(value) for option, value in options.items()}
    command = site.command("models", "retain", name, "--json", options=texts)
    python = f"from datasvc.models import RetentionPolicy\n{site.python('models.retain', name, policy)}"
    return Panel({"name": name, "applied": False, **plan.to_dict()}, command, python), None

"""The batch of a step of a run, as the training got it: the contact sheet of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from datasvc.errors import NotFoundError
from datasvc.shards.query.contact_sheet import Preview
from datasvc.ui.web.links import batch_image_link, batch_link, run_link, runs_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.views.replayed import ReplaySheet, describe_purged

_MAX_SAMPLES: Final = 100
_MAX_STEP: Final = 10**12
_MAX_RANKS: Final = 64  # with a link


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the batch of the `step` in the address; with `rank`, the part of a data rank."""
    run, step, rank = _address(parts, query)
    sheet = _read(site, parts, query)
    here = batch_link(run, step=step, rank=rank)
    reference, options = f"{run}@{step}", {"--rank": None if rank is None else str(rank)}
    problems = [] if sheet.fault is None else [Problem(f"There are no pictures: {sheet.fault}", severity="warning")]
    if sheet.purged:
        problems.append(Problem(f"{describe_purged(sheet.purged)}: they are masked here", severity="warning"))
    samples = sheet.batch["samples"][:_MAX_SAMPLES]
    previews: Sequence[Preview | None] = sheet.previews or [None] * len(samples)
    return Page(
        template="batch.html",
        title=f"Step {step} of {run}",
        section="runs",
        crumbs=(
            Crumb("Runs", runs_link()),
            Crumb(run, run_link(parts["name"], parts["id"])),
            Crumb(f"{run}@{step}", here),
        ),
        problems=tuple(problems),
        panels={
            "batch": Panel(
                sheet.batch,
                site.command("replay", reference, "--json", options=options),
                f"{site.python('models.batch_at', reference, rank=rank)}.to_json()",
            )
        },
        view={
            "site": site,
            "run": run,
            "step": step,
            "rank": rank,
            "sheet": sheet,
            "samples": list(zip(samples, previews, strict=True)),
            "image": lambda index: batch_image_link(run, index, step=step, rank=rank),
            "ranks": range(min(sheet.ranks or 0, _MAX_RANKS)),
        },
    )


def load_image(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the thumbnail of a sample of the batch, by its index in it."""
    previews, index = _read(site, parts, query).previews, parts["column"]
    if not (index.isascii() and index.isdigit() and len(index) < 6 and int(index) < len(previews)):
        raise NotFoundError(f"this batch shows {len(previews)} samples, counted from 0, and not {index[:40]!r}")
    for image in previews[int(index)].images.values():
        return RawResponse(image, "image/png")
    raise NotFoundError("the samples of this batch have no images")


def _address(parts: Parts, query: Query) -> tuple[str, int, int | None]:
    """Return run, step and rank. Raise ConfigError: they are not valid."""
    rank = None if query.text("rank") is None else query.number("rank", 0)
    return f"{parts['name']}/{parts['id']}", query.number("step", 1, low=1, high=_MAX_STEP), rank


def _read(site: Site, parts: Parts, query: Query) -> ReplaySheet:
    run, step, rank = _address(parts, query)
    # A step after the last version is replayed again once there is a version that has it.
    history = site.runs.read(site.repo.repository, parts["name"], parts["id"])
    options = "" if rank is None else f" --rank {rank}"
    return site.batches.get(
        f"{run}@{step}",
        rank,
        _MAX_SAMPLES,
        what=f"step {step} of {run}",
        command=f"datasvc replay {run}@{step}{options}",
        at=(len(history.versions), site.splits.last_redaction(site.repo.repository)),
    )

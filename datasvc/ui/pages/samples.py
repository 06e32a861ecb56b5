"""Samples of a split: a grid of thumbnails, and one sample with all its columns."""

from __future__ import annotations

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.shards.query.histogram import list_columns
from datasvc.shards.query.sample_details import details_of
from datasvc.shards.query.sample_page import PAGE_SAMPLES, find_key, no_page, page_of
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.sql_sandbox import warm
from datasvc.ui.pages.charts.sample_columns import describe_counted, list_sample_columns, sample_cell
from datasvc.ui.web.failures import Failures
from datasvc.ui.web.links import dataset_link, sample_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

# The search for the models that were trained on a sample reads all their versions; of more, only on request.
_MAX_MODELS = 20
_MAX_DUPLICATE_SHARDS = 64  # that are searched before a reader asks for all of them


def load_page(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return a page of samples; `where`, `order`, `start` and `key` in the address select among them.

    Images are shown as pictures, with `view=table` as a table, as all other samples.
    """
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    ref, split = str(dataset.resolved), parts["split"]
    samples = site.splits.samples(dataset, split)
    where, order, key = query.text("where"), query.text("order"), query.text("key")
    warm()  # a condition probably follows
    start = query.number("start", 0)
    problems: list[Problem] = []
    count = PAGE_SAMPLES
    page = None
    try:
        if key is not None:
            # The page of this one sample: another filter does not apply.
            where, order, start, count = None, None, find_key(samples, key), 1
    except NotFoundError as error:
        problems.append(Problem(str(error), severity="warning"))
        page = no_page(samples)
    try:
        page = page or page_of(samples, where=where, order=order, start=start, count=count)
    except ConfigError as error:
        # Show the message above the box, so that a mistyped condition can be corrected, and no samples: others than
        # those that were asked for would be taken for them.
        problems.append(Problem(str(error)))
        page = no_page(samples, where=where, order=order)
    view = query.choice("view", ("pictures", "table")) if samples.image_columns else "table"
    failures = Failures(site.faults, samples_link(ref, split))
    # Not in the address of samples without images: there is no other view.
    kept = {"view": view} if samples.image_columns and view == "table" else {}

    def link(where: str | None) -> str:
        return samples_link(ref, split, where=where, order=page.order, **kept)

    columns = []
    if view == "table":
        columns = list_sample_columns(site, dataset, samples.split, page.where, link, failures)
    options = {
        "--split": split,
        "--where": page.where,
        "--order": page.order,
        "--start": str(start) if start else None,
        "-n": None if count == PAGE_SAMPLES else str(count),
    }
    python = {
        "where": page.where,
        "order": page.order,
        "start": start or None,
        "count": None if count == PAGE_SAMPLES else count,
    }
    return Page(
        template="samples.html",
        title=f"{ref} {split}",
        section="datasets",
        crumbs=_crumbs(ref, split),
        problems=(*problems, *failures.problems()),
        panels={
            "samples": Panel(
                page.to_json(),
                site.command("samples", ref, "--json", options=options),
                site.python("datasets.samples", ref, split, **python),
            )
        },
        view={
            "site": site,
            "ref": ref,
            "split": split,
            "splits": list(dataset),
            "found": page,
            "where": where or "",
            "order": order or "",
            "key": key or "",
            "image_columns": samples.image_columns,
            "columns": list_columns(samples.split),
            "table_columns": columns,
            "counted": describe_counted(columns),
            "cell": sample_cell,
            "kept": kept,
            "columns_left_out": len(samples.split.table.sample_schema) - 1 > len(columns),
            "this_all": link(None),
            "view": view,
            "this": link(page.where),
        },
    )


def load_sample(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return one sample; `all` searches all shards for duplicates, and `models` the models trained on it."""
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    ref, split, number = str(dataset.resolved), parts["split"], _position(parts)
    samples = site.splits.samples(dataset, split)
    max_shards = _MAX_DUPLICATE_SHARDS if query.text("all") is None else None
    found = details_of(dataset, samples, number, max_shards=max_shards)
    key, name = found.sample.key, dataset.resolved.name
    options = {"--split": split, "--max-shards": None if max_shards is None else str(max_shards)}
    panels = {
        "sample": Panel(
            found.to_json(),
            site.command("sample", "--json", options=options, last=[ref, key]),
            site.python("datasets.sample", ref, key, split, max_shards=max_shards),
        )
    }
    if query.text("models") is not None:
        report = find_consumers(site.repo.repository, keys=[key], data=name, split=split)
        panels["models"] = Panel(
            report.to_json(),
            site.command(
                "models", "trained-on", "--json", options={"--sample": key, "--data": name, "--split": split}
            ),
            site.python("models.trained_on", keys=[key], data=name, split=split),
        )
    here = sample_link(ref, split, number)
    return Page(
        template="sample.html",
        title=f"{key}: {ref}",
        section="datasets",
        crumbs=(*_crumbs(ref, split), Crumb(key, here)),
        panels=panels,
        view={
            "site": site,
            "ref": ref,
            "split": split,
            "number": number,
            "found": found,
            "here": here,
            "image_columns": [column for column in samples.image_columns if column in found.sample.blob_bytes],
            "num_samples": len(samples.split),
            "finds_models": len(site.repo.models.names()) <= _MAX_MODELS,
        },
    )


def load_image(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the thumbnail of an image of a sample."""
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    samples = site.splits.samples(dataset, parts["split"])
    column, number = parts["column"], _position(parts)
    if column not in samples.image_columns:
        raise NotFoundError(f"{dataset.resolved}/{parts['split']} has no images in a column {column!r}")
    content = site.thumbnails.get(_image_name(samples, number, column), lambda: samples.blob(number, column))
    # A version never changes, but a tag in the address may move.
    return RawResponse(content, "image/jpeg", is_immutable=parts["ref"] == str(dataset.resolved))


def _image_name(samples: NumberedSamples, number: int, column: str) -> str:
    """Return what identifies an encoded image for ever: the repository, digests of index and shard, row and column.

    Pages read parts of shards and compare them with the sample index, not with the digest of the shard. Another
    repository may have made an index of its own for a shard of this one, and must not replace its pictures.
    """
    shard, row = samples.locate(number)
    table, url = samples.split.table, samples.split.repository.storage.url
    return f"{url} {table.index(shard)} {table.shard(shard).digest} {row} {column}"


def _position(parts: Parts) -> int:
    text = parts["position"]
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise NotFoundError(f"{text[:40]!r} is not the number of a sample; expected 0, 1, 2 ...")
    return int(text)


def _crumbs(ref: str, split: str) -> tuple[Crumb, ...]:
    return (
        Crumb("Data sets", "/datasets"),
        Crumb(ref, dataset_link(ref)),
        Crumb(split, samples_link(ref, split)),
    )

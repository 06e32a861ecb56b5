"""Samples of a split: a grid of thumbnails, and one sample with all its columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import NamedTuple

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.shards.format.schema import KEY
from datasvc.shards.images.thumbnail_cache import image_name, make_thumbnail
from datasvc.shards.query.histogram import list_columns
from datasvc.shards.query.query import quote_text
from datasvc.shards.query.sample_details import details_of
from datasvc.shards.query.sample_page import PAGE_SAMPLES, SamplePage, find_key, no_page, page_of, summary_to_json
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.labels import CLASS, with_class
from datasvc.shards.views.reference import name_exactly
from datasvc.sql_sandbox import warm
from datasvc.ui.pages.histogram_charts import Selection, describe_counted, list_sample_columns, sample_cell
from datasvc.ui.web.links import dataset_link, sample_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.seen_faults import Failures
from datasvc.ui.web.site import Site

# The search for the models that were trained on a sample reads all their versions; of more, only on request.
_MAX_MODELS = 20
_MAX_FULL_SIDE = 8192
_MAX_CSV_SAMPLES = 100_000
_MAX_DUPLICATE_SHARDS = 64  # that are searched before a reader asks for all of them


class _Found(NamedTuple):
    """The samples that an address selects; `problems` says why there are none. `key`: only the sample of this key."""

    page: SamplePage
    key: str | None
    max_samples: int
    problems: Sequence[Problem]


def load_page(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return a page of samples; `where`, `order`, `start` and `key` in the address select among them.

    Images are shown as pictures, with `view=table` as a table, as all other samples.
    """
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    split = parts["split"]
    ref = name_exactly(dataset, [split])
    samples = site.splits.samples(dataset, split)
    warm()  # a condition probably follows
    found = _find(samples, query)
    page = found.page
    if query.text("format") is not None and not found.problems:
        query.choice("format", ("csv",))
        return _csv(page_of(samples, where=page.where, order=page.order, count=_MAX_CSV_SAMPLES, max_shards=None))
    view = query.choice("view", ("pictures", "table")) if samples.image_columns else "table"
    failures = Failures(site.faults, samples_link(ref, split))
    # Not in the address of samples without images: there is no other view.
    kept = {"view": view} if samples.image_columns and view == "table" else {}

    def link(where: str | None) -> str:
        return samples_link(ref, split, where=where, order=page.order, **kept)

    columns = []
    if view == "table":
        columns = list_sample_columns(site, dataset, samples.split, page.where, link, failures)
    return Page(
        template="samples.html",
        title=_title(samples.split),
        section="datasets",
        crumbs=_crumbs(ref, samples.split),
        problems=(*found.problems, *failures.problems()),
        panels={"samples": _samples_panel(site, ref, split, found)},
        view={
            "site": site,
            "ref": ref,
            "version": str(dataset.resolved),
            "split": split,
            "view_of": samples.split.table.view,
            "is_weighted": bool(samples.split.table.weights),
            "splits": list(dataset),
            "found": page,
            "where": page.where or "",
            "order": page.order or "",
            "key": found.key or "",
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
            "csv_link": samples_link(ref, split, where=page.where, order=page.order, format="csv"),
            "text": query.text("find") or "",
        },
    )


def _find(samples: NumberedSamples, query: Query) -> _Found:
    """Return the samples that an address selects by `key`, or by `where`, `find`, `order` and `start`."""
    if (key := query.text("key")) is not None:
        # The page of this one sample: another filter does not apply.
        try:
            return _Found(page_of(samples, start=find_key(samples, key), count=1), key, 1, ())
        except NotFoundError as error:
            return _Found(no_page(samples), key, PAGE_SAMPLES, [Problem(str(error), severity="warning")])
    where, order, start = query.text("where"), query.text("order"), query.number("start", 0)
    if (text := query.text("find")) is not None:
        where = Selection(where, lambda joined: joined or "").added(_contains(samples.split, text))
    try:
        page = page_of(samples, where=where, order=order, start=start)
    except ConfigError as error:
        # Show the message above the box, so that a mistyped condition can be corrected, and no samples: others than
        # those that were asked for would be taken for them.
        return _Found(no_page(samples, where=where, order=order), None, PAGE_SAMPLES, [Problem(str(error))])
    return _Found(page, None, PAGE_SAMPLES, ())


def _samples_panel(site: Site, ref: str, split: str, found: _Found) -> Panel:
    page, count = found.page, None if found.max_samples == PAGE_SAMPLES else found.max_samples
    options = {
        "--split": split,
        "--where": page.where,
        "--order": page.order,
        "--start": str(page.start) if page.start else None,
        "-n": None if count is None else str(count),
    }
    python = {"where": page.where, "order": page.order, "start": page.start or None, "count": count}
    return Panel(
        page.to_json(),
        site.command("samples", ref, "--json", options=options),
        site.python("datasets.samples", ref, split, **python),
    )


def _contains(split: Split, text: str) -> str:
    """Return the condition that the key or the class of a sample contains a text, in upper or lower case."""
    names = with_class(split.table.sample_schema, split.classes).names
    columns = [KEY, *([CLASS] if CLASS in names else [])]
    found = " or ".join(f"contains(lower({column}), lower({quote_text(text)}))" for column in columns)
    return f"({found})"  # it may be joined with another condition


def _csv(page: SamplePage) -> RawResponse:
    """Return the samples that a page selects, of all shards, as CSV: blobs by their sizes."""
    if page.next_start is not None:
        raise ConfigError(
            f"more than {_MAX_CSV_SAMPLES:,} samples satisfy the condition; `datasvc sql {page.version} QUERY --csv` "
            "writes any number of them"
        )
    rows = [summary_to_json(sample) for sample in page.samples]
    columns = list(dict.fromkeys(name for row in rows for name in row["values"]))
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(("number", KEY, "class", *columns))
    for row in rows:
        values = (row["values"].get(name) for name in columns)
        cells = (value["bytes"] if isinstance(value, dict) and [*value] == ["bytes"] else value for value in values)
        texts = (json.dumps(cell, ensure_ascii=False) if isinstance(cell, (dict, list)) else cell for cell in cells)
        writer.writerow((row["number"], row["key"], row["class"], *texts))
    return RawResponse(buffer.getvalue().encode(), "text/csv")


def load_sample(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return one sample; `all` searches all shards for duplicates, and `models` the models trained on it."""
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    split, number = parts["split"], _position(parts)
    ref = name_exactly(dataset, [split])
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
        title=f"{key}: {dataset.resolved}",
        section="datasets",
        crumbs=(*_crumbs(ref, samples.split), Crumb(key, here)),
        panels=panels,
        view={
            "site": site,
            "ref": ref,
            "version": str(dataset.resolved),
            "split": split,
            "is_view": samples.split.table.view is not None,
            "number": number,
            "found": found,
            "here": here,
            "image_columns": [column for column in samples.image_columns if column in found.sample.blob_bytes],
            "num_samples": len(samples.split),
            "finds_models": len(site.repo.models.names()) <= _MAX_MODELS,
        },
    )


def load_image(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the thumbnail of an image of a sample; with `full` in the address, the image in its full size."""
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    samples = site.splits.samples(dataset, parts["split"])
    column, number = parts["column"], _position(parts)
    if column not in samples.image_columns:
        raise NotFoundError(f"{dataset.resolved}/{parts['split']} has no images in a column {column!r}")
    if query.text("full") is not None:
        # Encoded again, as a thumbnail is: a browser gets no bytes of a data set as they are.
        # A browser does not keep it: a purge may remove the sample.
        return RawResponse(make_thumbnail(samples.blob(number, column), _MAX_FULL_SIDE), "image/jpeg")
    # A version never changes, but a tag in the address may move.
    is_immutable = parts["ref"] == name_exactly(dataset, [samples.split.name])
    content = site.thumbnails.get(_image_name(samples, number, column), lambda: samples.blob(number, column))
    return RawResponse(content, "image/jpeg", is_immutable=is_immutable)


def _image_name(samples: NumberedSamples, number: int, column: str) -> str:
    shard, row = samples.locate(number)
    table = samples.split.table
    return image_name(samples.split.repository, table.index(shard), table.shard(shard).digest, row, column)


def _position(parts: Parts) -> int:
    text = parts["position"]
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise NotFoundError(f"{text[:40]!r} is not the number of a sample; expected 0, 1, 2 ...")
    return int(text)


def _title(split: Split) -> str:
    """Return version and split; of a view also how its samples were chosen."""
    view = split.table.view
    return f"{split.dataset} {split.name}" if view is None else f"{split.dataset} {split.name}: {view}"


def _crumbs(ref: str, split: Split) -> tuple[Crumb, ...]:
    return (
        Crumb("Data sets", "/datasets"),
        Crumb(split.dataset, dataset_link(split.dataset)),
        Crumb(split.name if split.table.view is None else "view", samples_link(ref, split.name)),
    )

"""Samples of a split: a grid of thumbnails, and one sample with all its columns."""

from __future__ import annotations

import csv
import io
import json

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.shards.format.schema import KEY
from datasvc.shards.query.histogram import list_columns
from datasvc.shards.query.query import quote_text
from datasvc.shards.query.sample_details import details_of
from datasvc.shards.query.sample_page import PAGE_SAMPLES, SamplePage, find_key, no_page, page_of, summary_to_json
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.labels import CLASS, with_class
from datasvc.sql_sandbox import warm
from datasvc.ui.pages.histogram_charts import Selection, describe_counted, list_sample_columns, sample_cell
from datasvc.ui.thumbnails import make_thumbnail
from datasvc.ui.web.links import dataset_link, sample_link, samples_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.seen_faults import Failures
from datasvc.ui.web.site import Site

# The search for the models that were trained on a sample reads all their versions; of more, only on request.
_MAX_MODELS = 20
_MAX_FULL_SIDE = 8192
_MAX_CSV_SAMPLES = 100_000
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
    if (text := query.text("find")) is not None:
        where = Selection(where, lambda joined: joined or "").added(_contains(samples.split, text))
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
    if query.text("format") is not None and not problems:
        query.choice("format", ("csv",))
        return _csv(page_of(samples, where=where, order=order, count=_MAX_CSV_SAMPLES, max_shards=None))
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
            "csv_link": samples_link(ref, split, where=page.where, order=page.order, format="csv"),
            "text": text or "",
        },
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


def load_image(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the thumbnail of an image of a sample; with `full` in the address, the image in its full size."""
    dataset = site.splits.version(site.repo.repository, parts["ref"])
    samples = site.splits.samples(dataset, parts["split"])
    column, number = parts["column"], _position(parts)
    if column not in samples.image_columns:
        raise NotFoundError(f"{dataset.resolved}/{parts['split']} has no images in a column {column!r}")
    if query.text("full") is not None:
        # Encoded again, as a thumbnail is: a browser gets no bytes of a data set as they are.
        content = make_thumbnail(samples.blob(number, column), _MAX_FULL_SIDE)
        return RawResponse(content, "image/jpeg", is_immutable=parts["ref"] == str(dataset.resolved))
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

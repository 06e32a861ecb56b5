"""Addresses of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from datasvc.runs.run_folders import is_run_id


def _address(*parts: str, query: Mapping[str, object] | None = None) -> str:
    path = "/" + "/".join(quote(part, safe="@") for part in parts)
    given = {name: value for name, value in (query or {}).items() if value not in {None, ""}}
    return f"{path}?{urlencode(given)}" if given else path


def dataset_link(ref: str, **query: object) -> str:
    """Return the address of the page of a data-set version, or of a data set's newest version."""
    return _address("datasets", ref, query=query)


def samples_link(ref: str, split: str, **query: object) -> str:
    """Return the address of the samples of a split; `where`, `key`, `order` and `start` select among them."""
    return _address("datasets", ref, "samples", split, query=query)


def sample_link(ref: str, split: str, position: int) -> str:
    """Return the address of one sample, by its position in the split."""
    return _address("datasets", ref, "samples", split, str(position))


def image_link(ref: str, split: str, position: int, column: str) -> str:
    """Return the address of the thumbnail of an image of a sample."""
    return _address("datasets", ref, "samples", split, str(position), "image", column)


def diff_link(old: str, new: str) -> str:
    """Return the address of the comparison of two data-set versions."""
    return _address("diff", old, new)


def batch_link(run: str, **query: object) -> str:
    """Return the address of the batch of a `step` of a run, NAME/ID; `rank` selects the part of a data rank."""
    return _address("runs", *run.split("/"), "batch", query=query)


def batch_image_link(run: str, index: int, **query: object) -> str:
    """Return the address of the thumbnail of a sample of a batch, see `batch_link`."""
    return _address("runs", *run.split("/"), "batch", "image", str(index), query=query)


def certificate_link(name: str, digest: str) -> str:
    """Return the address of the certificate of a purge of a data set."""
    return _address("datasets", name, "certificates", digest)


def model_link(ref: str, **query: object) -> str:
    """Return the address of the page of a model version, or of a model."""
    return _address("models", ref, query=query)


def compare_link(first: str, second: str) -> str:
    """Return the address of the comparison of two model versions."""
    return _address("compare", first, second)


def lineage_link(ref: str, key: str | None = None) -> str:
    """Return the address of the lineage of a model version; with `key`, of a sample of a data-set version."""
    return _address("lineage", ref, query={"key": key})


def runs_link(**query: object) -> str:
    """Return the address of the list of training runs; `name` selects those of one name."""
    return _address("runs", query=query)


def run_link(name: str, run_id: str) -> str:
    """Return the address of a training run."""
    return _address("runs", name, run_id)


def signal_link(run: str, signal: str) -> str:
    """Return the address of a signal of a run, NAME/ID."""
    return _address("runs", *run.split("/"), "signals", signal)


def cluster_link(**query: object) -> str:
    """Return the address of the nodes; `node` selects one by its URL, `data` a version whose owners are shown."""
    return _address("cluster", query=query)


def run_ref_link(ref: str) -> str | None:
    """Return the address of a run by its reference, NAME/ID; None for any other text that a program gave."""
    name, _, run_id = ref.partition("/")
    return run_link(name, run_id) if is_run_id(run_id) else None


def audit_link(ledger: str) -> str:
    """Return the address of the audit of a ledger, named as in the folder of ledgers."""
    return _address("audit", ledger)


def with_query(path: str, query: Mapping[str, object], **changes: object) -> str:
    """Return `path` with parameters, of which `changes` replaces some and removes those that are None."""
    merged = {name: value for name, value in {**query, **changes}.items() if value not in {None, ""}}
    return f"{path}?{urlencode(merged)}" if merged else path

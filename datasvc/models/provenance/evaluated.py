"""Finds the evaluation samples that a model was trained on, by the digests of their content.

The content of a sample is its images or other blobs; without any, as of text and tokens, all its values but the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.provenance.consumed_ranges import parse_use
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.segments import plan_segments
from datasvc.models.registry.ancestry import read_ancestry
from datasvc.models.versions.data_use import DataUse
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.sources.common.options import HELD_OUT_SPLIT
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.split_overlap import count_unchecked, find_overlaps
from datasvc.shown import ShownTable, rows_to_arrow


class TrainedSample(NamedTuple):
    """An evaluation sample whose content the training data has too.

    Attributes:
        data: split of the evaluation, such as "digits@1/val".
        key: its key there.
        trained_key: key of the first equal sample in the training data.
        trained_data: split of the training data.
        is_consumed: whether the version was trained on that sample; False: it is in the data, but was not read.
    """

    data: str
    key: str
    trained_key: str
    trained_data: str
    is_consumed: bool


@dataclass(frozen=True)
class EvaluationOverlap(ShownTable):
    """Evaluation samples that a version was trained on.

    Attributes:
        version: the version.
        evaluated: number of samples of each split of the evaluation.
        samples: those that the training data has too.
        num_unchecked: samples without a sample index, whose content was not compared.
        gaps: what of the training is unknown.
    """

    version: str
    evaluated: Mapping[str, int]
    samples: tuple[TrainedSample, ...]
    num_unchecked: int
    gaps: tuple[str, ...]

    def to_arrow(self) -> pa.Table:
        """Return a row for each sample, with the fields of `TrainedSample`."""
        return rows_to_arrow([sample._asdict() for sample in self.samples])

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        fields = {name: value for name, value in vars(self).items() if name != "samples"}
        return fields | {"gaps": list(self.gaps), "samples": [sample._asdict() for sample in self.samples]}


def find_evaluated(
    repository: Repository, ref: str, *, data: str | None = None, split: str = HELD_OUT_SPLIT
) -> EvaluationOverlap:
    """Find evaluation samples that are in the training data of a version, by the digests of their content.

    Args:
        repository: repository of the model and its data.
        ref: model version, such as "digits-cnn@3".
        data: data-set version of the evaluation, or views of one, such as "pets@3[label = 3]"; None: the evaluation
            data of the version's entry, or else the versions that it was trained on.
        split: split of `data`, or of these versions.

    Raises:
        NotFoundError: the version, the evaluation data or the training data does not exist (any more).
        CorruptDataError, UnavailableError: an entry or a sample index cannot be read.
    """
    version = str(repository.resolve("models", ref, removed=True))
    ancestry = read_ancestry(repository, [version])
    planned = plan_segments(ancestry)
    trained = {
        digest: name
        for part in planned.values()
        for consumed in part.consumed
        for digest, name in zip(consumed.segment.order.tables, consumed.segment.order.names, strict=True)
    }
    if not trained:
        raise NotFoundError(f"{version} does not record what it was trained on; save it with data=")
    uses = [use for use in ancestry.versions[version].uses if use.purpose == "evaluation"]
    evaluated = _evaluated_tables(repository, uses, trained, data, split)
    tables = {digest: _read_table(repository, digest, name) for digest, name in (trained | evaluated).items()}
    samples: list[TrainedSample] = []
    for digest, name in evaluated.items():
        for other, other_name in trained.items():
            pair = {"evaluation": tables[digest], "training": tables[other]}
            for overlap in find_overlaps(repository.objects, pair, values=True):
                if overlap.kind == "payload":
                    keys = overlap.samples.other_keys.to_pylist()
                    samples += _consumed(
                        repository, version, name, overlap.samples.keys.to_pylist(), keys, other_name
                    )
    return EvaluationOverlap(
        version,
        {name: tables[digest].num_samples for digest, name in evaluated.items()},
        tuple(samples),
        count_unchecked({digest: tables[digest] for digest in evaluated}),
        tuple(gap for part in planned.values() for gap in part.gaps),
    )


def count_evaluated(
    repository: Repository, ref: str, max_samples: int
) -> tuple[EvaluationOverlap, dict[str, tuple[int, int]]]:
    """Return `find_evaluated` with the first samples alone, and for each split of the evaluation two counts.

    They are the number of its samples that the training data has, and of those that the version was trained on.
    """
    found = find_evaluated(repository, ref)
    in_data = Counter(sample.data for sample in found.samples)
    consumed = Counter(sample.data for sample in found.samples if sample.is_consumed)
    return (
        replace(found, samples=found.samples[:max_samples]),
        {name: (in_data[name], consumed[name]) for name in found.evaluated},
    )


def _evaluated_tables(
    repository: Repository, uses: list[DataUse], trained: Mapping[Digest, str], data: str | None, split: str
) -> dict[Digest, str]:
    """Return digest and name of the shard tables of the evaluation."""
    if data is not None:
        evaluated = open_dataset(repository, data)[split]
        return {parse_digest(evaluated.digest): evaluated.title}
    found: dict[Digest, str] = {}
    for use in uses:
        order, _ = parse_use(use)
        found |= dict(zip(order.tables, order.names, strict=True))
    if found:
        return found
    for name in dict.fromkeys(name.partition("[")[0].rpartition("/")[0] for name in trained.values()):
        version = open_dataset(repository, name)
        if split in version:
            found[parse_digest(version[split].digest)] = f"{name}/{split}"
    if not found:
        raise ConfigError(
            f"the data of this version has no split {split!r}; give --data and --split of the evaluation"
        )
    return found


def _read_table(repository: Repository, digest: Digest, name: str) -> ShardTable:
    try:
        return ShardTable.read(repository.objects, digest)
    except NotFoundError as error:
        raise NotFoundError(f"{name} is no longer in {repository.url}, so its samples cannot be compared") from error


def _consumed(
    repository: Repository, version: str, evaluated: str, keys: list[str], trained_keys: list[str], trained: str
) -> Iterator[TrainedSample]:
    """Yield the samples of an overlap, with whether the version consumed the equal one."""
    dataset, _, split = trained.partition("[")[0].rpartition("/")
    distinct = list(dict.fromkeys(trained_keys))
    report = find_consumers(repository, [version], keys=distinct, data=parse_reference(dataset).name, split=split)
    seen = {key for number, key in enumerate(report.keys) if report.versions_with(number)}
    for key, trained_key in zip(keys, trained_keys, strict=True):
        yield TrainedSample(evaluated, key, trained_key, trained, trained_key in seen)

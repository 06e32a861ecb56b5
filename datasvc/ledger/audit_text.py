"""An audit as JSON values and as sentences, with the keys of samples, for `datasvc audit` and for pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from datasvc.errors import ConfigError
from datasvc.ledger.audit import Audit, EpochAudit
from datasvc.ledger.file import Header
from datasvc.ledger.strided_range import Uneven, first_positions
from datasvc.order import OrderState
from datasvc.printable import count_text
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import read_version
from datasvc.shards.versions.keys import SplitKeys
from datasvc.shards.views.reference import find_view


def open_names(result: Audit, open_repository: Callable[[], Repository]) -> SampleNames | None:
    """Return a lookup of the keys of samples; None if the audit has no sample to list.

    The repository is opened only if there are samples to list. For errors, see `SampleNames`.
    """
    if not any(epoch.never.count or epoch.repeated.count for epoch in result.epochs):
        return None
    return SampleNames(open_repository(), result.header)


def audit_facts(result: Audit, show: int, names: SampleNames | None) -> dict[str, Any]:
    """Return an audit as JSON values, as `datasvc audit --json` prints it.

    Args:
        result: the audit.
        show: maximum number of samples of each kind to list.
        names: lookup of their keys; None: positions only.
    """
    epochs = []
    for epoch in result.epochs:
        counts = {name: value for name, value in vars(epoch).items() if name not in {"never", "repeated"}}
        for name in ("left_out", "returned", "carried"):  # fields that most audits do not have
            if not counts[name]:
                del counts[name]
        samples = {
            name: {"count": uneven.count, "samples": list_samples(uneven, epoch.epoch, show, names)}
            for name, uneven in (("never", epoch.never), ("repeated", epoch.repeated))
        }
        epochs.append({**counts, **samples, "is_proven": epoch.is_proven})
    facts = {name: value for name, value in vars(result).items() if name not in {"header", "epochs"}}
    order = {
        name: value for name, value in asdict(result.header).items() if name in {"source", "order", "num_samples"}
    }
    return {**facts, **order, "epochs": epochs, "is_proven": result.is_proven}


def list_samples(uneven: Uneven, epoch: int, show: int, names: SampleNames | None) -> list[dict[str, Any]]:
    """Return position and, with `names`, key of the first `show` samples of a set of positions."""
    positions = first_positions(uneven.ranges, show)
    keys = [None] * len(positions) if names is None else names.keys(epoch, positions)
    return [
        {"position": position} if key is None else {"position": position, "key": key}
        for position, key in zip(positions, keys, strict=True)
    ]


def describe_conclusion(epoch: EpochAudit) -> str:
    """Return what the audit proved for an epoch."""
    if epoch.never.count or epoch.repeated.count:
        return f"not proven: {count_text(epoch.never.count, 'sample')} never, {epoch.repeated.count} more than once"
    if not epoch.is_faultless:
        return "not proven: its ranks contradict each other"
    part = "" if epoch.is_finished else f"in the first {epoch.reached:,} of {epoch.num_samples:,} positions, "
    state = "proven" if epoch.is_finished else "not finished"
    return f"{state}: {part}no sample was lost or served twice; {describe_outcome([epoch])}"


def describe_outcome(epochs: Sequence[EpochAudit]) -> str:
    """Return what happened to the samples of epochs without errors, such as "8 of 9 served once, 1 masked"."""
    # Masked and dropped samples are not lost, but they were not trained on either: no sentence may hide them.
    served, masked, left_out, dropped, reached = (
        sum(getattr(epoch, name) for epoch in epochs)
        for name in ("served", "masked", "left_out", "dropped", "reached")
    )
    texts = {
        f"{served:,} of {reached:,} served once": True,
        f"{masked:,} masked": masked,
        f"{left_out:,} left out on request": left_out,
        f"{dropped:,} dropped by the tail": dropped,
    }
    return ", ".join(text for text, is_shown in texts.items() if is_shown)


def describe_counts(epoch: EpochAudit) -> list[str]:
    """Return how the samples of an epoch were served, in one to four sentences."""
    counts = {
        f"served {epoch.served:,}": True,
        f"masked {epoch.masked:,} that did not decode": epoch.masked,
        f"left out {epoch.left_out:,} on request": epoch.left_out,
        f"dropped {epoch.dropped:,} that filled no batch": epoch.dropped,
        f"padded with {epoch.padded:,}": epoch.padded,
    }
    lines = [", ".join(text for text, is_shown in counts.items() if is_shown)]
    if epoch.again:
        lines.append(
            f"{epoch.again} were also served before a restart from an older state; those weights are discarded"
        )
    if epoch.returned:
        lines.append(f"{epoch.returned} were also served by ranks that were lost before their updates were applied")
    if epoch.carried:
        lines.append(f"{epoch.carried} were served before a replica was lost, and the others continued their weights")
    if epoch.copies:
        lines.append(f"{epoch.copies} more are in other files of the same ranks: model-parallel peers, or retries")
    return lines


class SampleNames:
    """Lookup of the names of samples, that is, of their keys, at positions of a run.

    Args:
        repository: repository with the data that the run read.
        header: header of a ledger file of the run; it identifies the data and the access order.

    Raises:
        ConfigError: the run read a mixture; or the version in the repository is not the one that the run read.
        NotFoundError: the version does not exist.
        CorruptDataError, UnavailableError: the version cannot be read.
    """

    def __init__(self, repository: Repository, header: Header) -> None:
        try:
            # Only the parameters of the order are needed. The header lacks an epoch and a position: set them to 0.
            state = OrderState.from_dict({**header.order, "epoch": 0, "position": 0})
        except ConfigError as error:
            # The state of a mixture has other fields.
            raise ConfigError(
                f"{header.source} is not a single split, so positions have no keys; leave out --repo"
            ) from error
        self._config = state.config
        ref, _, split = header.source.rpartition("/")  # such as "pets@3/train"
        # A version that was removed since, also by a rename, keeps its shard tables and sample indexes.
        self._split = read_version(repository, repository.resolve("datasets", ref, removed=True))[split]
        # A data set of the same name in another repository may have other samples, so compare the shard tables.
        if self._split.digest != state.version and (view := find_view(self._split, state.version)):
            self._split = view
        if self._split.digest != state.version:
            raise ConfigError(
                f"{header.source} in {repository.url} has shard table {self._split.digest[:12]}..., the run read "
                f"{state.version[:12]}...; give the repository that the run read"
            )
        self._keys = SplitKeys(repository.objects, self._split.table)

    def keys(self, epoch: int, positions: Sequence[int]) -> list[str]:
        """Return the keys of the samples at positions of an epoch, in the given order; of a pack, all with " + ".

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the repository cannot be read.
        """
        order = self._split.access_order(self._config, epoch)
        indices, shards, rows = order.samples_at(np.asarray(positions, np.int64))
        # Read the sample index of each shard once, even if several positions are in the shard.
        keys = {shard: self._keys.read(shard).keys for shard in np.unique(shards).tolist()}
        found: list[list[str]] = [[] for _ in positions]
        for index, shard, row in zip(indices.tolist(), shards.tolist(), rows.tolist(), strict=True):
            found[index].append(keys[shard][row].as_py())
        return [" + ".join(each) for each in found]

"""An audit as JSON values and as sentences, for `datasvc audit` and for pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from datasvc.ledger.audit import Audit, EpochAudit
from datasvc.ledger.coverage import Uneven
from datasvc.ledger.names import SampleNames
from datasvc.ledger.strided_range import first_positions
from datasvc.printable import count_text
from datasvc.repository import Repository


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
    served, masked, dropped, reached = (
        sum(getattr(epoch, name) for epoch in epochs) for name in ("served", "masked", "dropped", "reached")
    )
    texts = {
        f"{served:,} of {reached:,} served once": True,
        f"{masked:,} masked": masked,
        f"{dropped:,} dropped by the tail": dropped,
    }
    return ", ".join(text for text, is_shown in texts.items() if is_shown)


def describe_counts(epoch: EpochAudit) -> list[str]:
    """Return how the samples of an epoch were served, in one to three sentences."""
    counts = {
        f"served {epoch.served:,}": True,
        f"masked {epoch.masked:,} that did not decode": epoch.masked,
        f"dropped {epoch.dropped:,} that filled no batch": epoch.dropped,
        f"padded with {epoch.padded:,}": epoch.padded,
    }
    lines = [", ".join(text for text, is_shown in counts.items() if is_shown)]
    if epoch.again:
        lines.append(
            f"{epoch.again} were also served before a restart from an older state; those weights are discarded"
        )
    if epoch.copies:
        lines.append(f"{epoch.copies} more are in other files of the same ranks: model-parallel peers, or retries")
    return lines

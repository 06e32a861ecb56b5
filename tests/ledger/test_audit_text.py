"""The sentences of an audit."""

import pytest

from datasvc.ledger.audit import EpochAudit
from datasvc.ledger.audit_text import describe_conclusion, describe_outcome
from datasvc.ledger.strided_range import Uneven, contiguous

NONE = Uneven(0, [])


def epoch_audit(served, *, masked=0, dropped=0, is_finished=True, never=NONE, repeated=NONE, disagreements=()):
    reached = served + masked + dropped + never.count + repeated.count
    return EpochAudit(
        epoch=0,
        num_samples=reached if is_finished else 2 * reached,
        reached=reached,
        is_finished=is_finished,
        served=served,
        masked=masked,
        dropped=dropped,
        padded=0,
        never=never,
        repeated=repeated,
        again=0,
        copies=0,
        reasons=(),
        disagreements=disagreements,
    )


@pytest.mark.parametrize(
    ("epoch", "outcome"),
    [
        (epoch_audit(1425), "1,425 of 1,425 served once"),
        (epoch_audit(1408, dropped=17), "1,408 of 1,425 served once, 17 dropped by the tail"),
        (epoch_audit(1423, masked=2), "1,423 of 1,425 served once, 2 masked"),
        (epoch_audit(1406, masked=2, dropped=17), "1,406 of 1,425 served once, 2 masked, 17 dropped by the tail"),
    ],
)
def test_a_proof_counts_masked_and_dropped_samples_apart_from_served_ones(epoch, outcome):
    assert describe_conclusion(epoch) == f"proven: no sample was lost or served twice; {outcome}"


def test_an_unfinished_epoch_is_described_up_to_the_position_of_all_ranks():
    text = describe_conclusion(epoch_audit(990, masked=10, is_finished=False))
    assert text == (
        "not finished: in the first 1,000 of 2,000 positions, no sample was lost or served twice; "
        "990 of 1,000 served once, 10 masked"
    )


def test_several_epochs_are_added():
    assert describe_outcome([epoch_audit(8, dropped=2), epoch_audit(10)]) == (
        "18 of 20 served once, 2 dropped by the tail"
    )


def test_an_epoch_with_an_error_is_not_proven():
    lost = epoch_audit(8, never=Uneven(2, [contiguous(0, 2)]))
    assert describe_conclusion(lost) == "not proven: 2 samples never, 0 more than once"
    assert (
        describe_conclusion(epoch_audit(8, disagreements=["tail"])) == "not proven: its ranks contradict each other"
    )

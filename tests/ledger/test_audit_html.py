"""The audit of a run as a notebook shows it."""

import dataclasses

from datasvc.ledger.audit import audit
from datasvc.ledger.file import read_ledger
from datasvc.shards import open_dataset
from tests.drawing.hostile import HOSTILE, parsed, text_of
from tests.loaders.echo import EchoLoader, write_numbers


def test_an_audit_shows_the_verdict_of_each_epoch_and_its_problems(repository, tmp_path):
    write_numbers(repository, [25, 15])
    with EchoLoader(
        open_dataset(repository, "numbers")["train"], batch_size=6, rank=0, world_size=1, ledger=tmp_path / "ledger"
    ) as loader:
        assert len(list(loader)) == 6
    result = audit([list(read_ledger(tmp_path / "ledger"))])
    shown = text_of(parsed(result._repr_html_()))
    assert "proven: no sample was lost or served twice; 36 of 40 served once, 4 dropped by the tail 36 0 4" in shown
    damaged = dataclasses.replace(result, damage=HOSTILE)
    assert "result not proven" in text_of(parsed(damaged._repr_html_()))

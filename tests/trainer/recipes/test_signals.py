"""`--signals loss`: the losses of samples as a run sees them, whatever interrupts it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError
from datasvc.models import describe_model
from datasvc.runs import resolve_run
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train
from tests.cli.command import run as run_command
from tools.make_digits import write_digits

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, VOCABULARY, FLIPPED = 16, 11, 14  # 1 % of the digits


@pytest.fixture(scope="module")
def digits_with_wrong_labels(tmp_path_factory):
    """A repository of digits, of which some are in the folder of another class; and the keys of these."""
    folder = tmp_path_factory.mktemp("flipped")
    write_digits(folder / "digits", 0)
    random, wrong = np.random.default_rng(1), set()
    files = sorted((folder / "digits" / "train").rglob("*.jpg"))
    for number in random.choice(len(files), FLIPPED, replace=False):
        file = files[number]
        label = (int(file.parent.name) + random.integers(1, 10)) % 10
        file.rename(file.parents[1] / str(label) / file.name)
        wrong.add(f"{label}/{file.name}")
    repo = datasvc.open(str(folder / "repo"), create=True)
    repo.datasets.ingest(str(folder / "digits"), "digits")
    starts = random.integers(0, VOCABULARY, 64)
    tokens = pa.array(((starts[:, None] + 3 * np.arange(BLOCK)) % VOCABULARY).tolist(), pa.list_(pa.int32(), BLOCK))
    pq.write_table(pa.table({"tokens": tokens}), folder / "tokens.parquet")
    repo.datasets.ingest(str(folder / "tokens.parquet"), "tokens")
    return repo, wrong


def run(repo, name, **settings):
    defaults = {"data": "digits", "size": 32, "scale": (0.95, 1.0), "flip": 0.0, "batch_size": 32, "epochs": 3}
    defaults |= {"optimizer": "adamw", "learning_rate": 0.003, "signals": "loss", "evaluate_every": 3}
    train(TrainConfig(repo=repo.repository.url, name=name, **(defaults | settings)))


TOKENS = {"data": "tokens", "vocabulary": VOCABULARY, "batch_size": 8, "epochs": 2}
TOKENS |= {"model_option": ("layers=1", "heads=2", "width=32", f"context={BLOCK}")}
TOKENS |= {"size": 224, "scale": (0.08, 1.0), "flip": 0.5}  # the defaults: options of images do not fit tokens


@pytest.mark.slow
def test_wrong_labels_have_the_largest_losses_after_three_epochs(digits_with_wrong_labels):
    repo, wrong = digits_with_wrong_labels
    run(repo, "found")
    split = repo.dataset("digits")["train"]
    losses = repo.runs.signal("found", split)
    assert not np.isnan(losses).all()
    worst = {split[int(number)]["key"] for number in np.argsort(-np.nan_to_num(losses))[:FLIPPED]}
    assert len(worst & wrong) / FLIPPED > 0.9


@pytest.mark.slow
def test_the_losses_become_a_column_that_weighs_samples(digits_with_wrong_labels):
    repo, _ = digits_with_wrong_labels
    run(repo, "weighed", epochs=1)
    options = ("--from", "run:weighed", "--repo", repo.repository.url)
    added = run_command("columns", "digits", "add", "loss@weighed", *options)
    assert added.returncode == 0, added.stderr
    split = repo.dataset("digits")["train"]
    values = repo.runs.signal("weighed", repo.dataset("digits@1")["train"])
    np.testing.assert_array_equal(split.to_pandas()["loss@weighed"].to_numpy(np.float32), values)
    recorded = split.where('"loss@weighed" IS NOT NULL')
    assert len(recorded) == np.isfinite(values).sum() < len(split)
    assert len(recorded.weighted("loss@weighed")) == len(recorded)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"epochs": 1}, TOKENS], ids=["images", "tokens"])
def test_recording_the_losses_does_not_change_the_weights(digits_with_wrong_labels, settings):
    repo, _ = digits_with_wrong_labels
    kind = settings.get("data", "images")
    run(repo, f"{kind}-recorded", **settings)
    run(repo, f"{kind}-plain", **settings, signals=None)
    recorded, plain = (describe_model(repo.repository, f"{kind}-{name}") for name in ("recorded", "plain"))
    assert recorded.entry["content"] == plain.entry["content"]
    losses = repo.runs.signal(f"{kind}-recorded", repo.dataset(settings.get("data", "digits"))["train"])
    assert np.isfinite(losses).sum() >= 0.9 * len(losses)


@pytest.mark.slow
def test_a_resumed_run_has_the_signal_of_one_that_was_never_interrupted(digits_with_wrong_labels):
    repo, _ = digits_with_wrong_labels
    run(repo, "whole", epochs=2, evaluate_every=1)
    for max_steps in (20, 50):
        run(repo, "resumed", epochs=2, evaluate_every=1, max_steps=max_steps)
    run(repo, "resumed", epochs=2, evaluate_every=1)
    split = repo.dataset("digits")["train"]
    assert "/".join(resolve_run(repo.repository, "resumed")) != "/".join(resolve_run(repo.repository, "whole"))
    for reduce in ("last", "mean"):
        signals = [repo.runs.signal(name, split, reduce=reduce) for name in ("whole", "resumed")]
        np.testing.assert_array_equal(*signals)


def test_a_signal_without_a_run_log_is_refused(digits_with_wrong_labels):
    repo, _ = digits_with_wrong_labels
    with pytest.raises(ConfigError, match="signals belong to the log of the run"):
        run(repo, "no-log", run_log=False)

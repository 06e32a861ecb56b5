"""The task of classifying sounds: chosen by the data, and trained on tones."""

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.audio import AudioClassification
from datasvc.trainer.recipes.tasks.task import DataPlacement
from datasvc.trainer.recipes.train import train
from datasvc.trainer.recipes.training_data import choose_task
from tests.support.doc_blocks import read_blocks, replace_in, run_blocks
from tests.support.sounds import encode, ingest_files, write_files

NOTES = [300, 420, 600, 850, 1_200, 1_700, 2_400, 3_400]
SETTINGS = {"clip_seconds": 0.5, "sample_rate": 8_000, "mels": 40}


def tone(hz, random):
    """Return a tone in noise, of 0.4 to 0.8 seconds, as a WAV file of 8 or 11 kHz."""
    rate = int(random.choice([8_000, 11_025]))
    seconds = np.arange(int(rate * random.uniform(0.4, 0.8))) / rate
    wave = np.sin(2 * np.pi * hz * random.uniform(0.97, 1.03) * seconds + random.uniform(0, 6))
    return encode(0.3 * wave + 0.1 * random.standard_normal(len(wave)), rate)


def tones(folder, counts):
    random = np.random.default_rng(0)
    files = {
        f"{split}/note{number}/{index}.wav": tone(hz, random)
        for split, count in counts.items()
        for number, hz in enumerate(NOTES)
        for index in range(count)
    }
    return write_files(folder, files)


@pytest.fixture
def repository(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    ingest(repository, str(tones(tmp_path / "tones", {"train": 2})), "tones")
    return repository


def test_the_data_choose_the_task_and_its_batches_fit_the_model(repository):
    split = open_dataset(repository, "tones")["train"]
    task = choose_task(TrainConfig(data="d", repo="r", name="m", gain_db=3, time_masks=1, **SETTINGS), split)
    assert isinstance(task, AudioClassification)
    model = task.build_model(task.default_model, {})
    place = DataPlacement(0, 1, torch.device("cpu"), num_threads=1)
    with task.open_loader(split, training=True, batch_size=5, cache=None, place=place) as loader:
        examples = task.unpack(next(iter(loader)), torch.device("cpu"))
    assert examples.inputs.shape == (5, 1, 40, 51)
    assert model(examples.inputs).shape == (5, 8)
    assert task.sum_loss(model, examples).isfinite()


@pytest.mark.parametrize("setting", [{"jitter": "0.1,0,0,0"}, {"decode": "cpu"}, {"channels_last": True}])
def test_settings_of_images_are_refused(repository, setting):
    config = TrainConfig(data="d", repo="r", name="m", **setting)
    with pytest.raises(ConfigError, match=r"is for images, and .* holds sounds; leave it out"):
        choose_task(config, open_dataset(repository, "tones")["train"])


def test_a_sound_that_does_not_decode_has_no_target_if_the_run_masks_it(repository, tmp_path):
    broken = np.ones(4_000)
    broken[0] = np.nan
    files = {"a/1.wav": encode(np.ones(4_000), 8_000), "b/2.wav": encode(broken, 8_000, subtype="FLOAT")}
    split = ingest_files(repository, tmp_path / "bad", files, "bad")
    task = choose_task(TrainConfig(data="d", repo="r", name="m", on_bad="mask", **SETTINGS), split)
    place = DataPlacement(0, 1, torch.device("cpu"), num_threads=1)
    with task.open_loader(split, training=False, batch_size=2, cache=None, place=place) as loader:
        examples = task.unpack(next(iter(loader)), torch.device("cpu"))
    assert (examples.targets.tolist(), task.count_targets(examples)) == ([0, -100], 1)
    assert task.make_example(None).shape == (1, *examples.inputs.shape[1:])


@pytest.mark.slow
def test_a_small_model_learns_keywords_of_tones(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    ingest(repository, str(tones(tmp_path / "tones", {"train": 40, "val": 25})), "tones")
    version = train(
        TrainConfig(
            repo=repository.url,
            data="tones",
            name="keywords",
            batch_size=16,
            epochs=5,
            optimizer="adamw",
            learning_rate=0.003,
            gain_db=6,
            time_masks=1,
            **SETTINGS,
        )
    )
    assert describe_model(repository, version).entry["metrics"]["val_accuracy"] >= 0.97


@pytest.mark.slow
def test_every_command_and_program_of_the_page_on_sounds_runs(tmp_path):
    folder = tones(tmp_path / "speech", {"train": 3, "val": 1})
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in folder.rglob("*.wav")]
    (tmp_path / "speech.csv").write_text("\n".join(["path,text", *rows]))
    blocks = replace_in(read_blocks("audio.md"), {"--epochs 20": "--epochs 1 --batch-size 4"})
    printed = run_blocks(blocks, tmp_path)
    assert '"version": "keywords@1"' in printed

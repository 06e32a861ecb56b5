"""Mixtures, ledgers, decode groups and what else loaders have, by the settings of a run."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError, StateMismatchError
from datasvc.ledger.audit import audit
from datasvc.ledger.file import read_ledger
from datasvc.loaders import AugmentConfig, DataRanks, DecodeConfig, DecodeGroup, OrderConfig, PixelFormat, TokenFormat
from datasvc.models import describe_model, find_consumers
from datasvc.models.versions.data_use import use_text
from datasvc.planning.layout import Layout
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.groups.data import OrderSettings, TokenSettings
from datasvc.trainer.recipes.settings.groups.images import DecodeSettings, ImageSettings
from datasvc.trainer.recipes.start import choose_place
from datasvc.trainer.recipes.tasks import classification, language
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.task import DataPlacement
from datasvc.trainer.recipes.train import train
from datasvc.trainer.recipes.training_data import open_data, resolve_data
from tests.samples import write_folder

pytestmark = pytest.mark.usefixtures("one_thread")

MIXTURE = "cats@1:0.75 dogs@1:0.25"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two data sets with one class in common; `birds` has no split "val"."""
    folder = tmp_path_factory.mktemp("mixed")
    repository = Repository.create(str(folder / "repo"))
    pictures = {
        "cats": {"train": {"lion": 24, "other": 8}, "val": {"lion": 6, "other": 3}},
        "dogs": {"train": {"other": 8, "wolf": 12}, "val": {"other": 2, "wolf": 4}},
        "birds": {"train": {"owl": 16}},
    }
    for number, (name, counts) in enumerate(pictures.items()):
        ingest(repository, str(write_folder(folder / name, counts, start=100 * number)), name)
    return repository


def make_config(repository, **settings):
    small = {"data": "cats@1", "name": "m", "size": 16, "batch_size": 8, "epochs": 1, "model": "small-cnn"}
    return TrainConfig(repo=repository.url, **{**small, **settings})


def keys_of(repository, reference):
    return [sample["key"] for sample in open_dataset(repository, reference)["train"]]


def mirror(image, generator):
    """A transform, named by the settings as "module:function"."""
    return image[:, ::-1].copy()


def test_a_run_trains_on_a_mixture_and_its_entry_names_every_data_version(repository):
    train(make_config(repository, name="mixed", data=MIXTURE, mixture_block=8, max_steps=4))
    entry = describe_model(repository, "mixed").entry
    assert [(use["dataset"], use["split"]) for use in entry["data"]] == [("cats@1, dogs@1", "mixture")]
    assert [split["name"] for split in entry["data"][0]["state"]["mixture"]["splits"]] == [
        "cats@1/train",
        "dogs@1/train",
    ]
    assert entry["config"]["data"] == MIXTURE
    # Continued, also after the run has stopped in the middle of an epoch, and refused with other weights.
    train(make_config(repository, name="mixed", data=MIXTURE, mixture_block=8))
    assert describe_model(repository, "mixed").entry["parent"] == "mixed@1"
    with pytest.raises(StateMismatchError):
        train(make_config(repository, name="mixed", data="cats@1:0.5 dogs@1:0.5", mixture_block=8, epochs=2))


@pytest.mark.slow
def test_a_run_trains_on_a_view_and_continues_with_it(repository):
    data = "cats@1[key <> 'none' and label is not null]"
    train(make_config(repository, name="viewed", data=data, max_steps=1))
    train(make_config(repository, name="viewed", data=data, max_steps=2))
    entry = describe_model(repository, "viewed").entry
    view = open_dataset(repository, "cats@1")["train"].where("key <> 'none' and label is not null")
    assert (entry["parent"], entry["data"][0]["state"]["version"]) == ("viewed@1", view.digest)
    (use,) = entry["data"]
    assert use_text(use) == f"cats@1/train[{view.view}]"
    with pytest.raises(StateMismatchError, match=r"cats@1/train\["):
        train(make_config(repository, name="viewed", data="cats@1", max_steps=3))
    with pytest.raises(StateMismatchError, match=r"belongs to cats@1/train\[.*'none'.*reads cats@1/train\[.*'other'"):
        train(make_config(repository, name="viewed", data="cats@1[key <> 'other']", max_steps=3))


def test_a_view_without_a_version_is_one_of_the_newest_and_is_recorded_with_its_digests(repository):
    repo, config = datasvc.open(repository.url), make_config(repository, data="cats[key not like '%[0]]%']")
    opened = repo.dataset("cats@1[key not like '%[0]]%']")
    assert resolve_data(repo, config) == [f"cats@1[{opened['train'].digest},{opened['val'].digest}]"]


def test_views_may_be_parts_of_a_mixture(repository):
    viewed = "cats@1[label >= 0]:0.5 dogs@1:0.5"
    train(make_config(repository, name="parts", data=viewed, mixture_block=8, max_steps=1))
    (use,) = describe_model(repository, "parts").entry["data"]
    assert use_text(use) == """cats@1, dogs@1/mixture[cats@1: ("label" >= 0)]"""
    parts = make_config(repository, data="cats@1[label in (0, 1)]:0.5 dogs@1[key <> 'a b']:1/2").parse_data()
    assert [reference for reference, _ in parts] == ["cats@1[label in (0, 1)]", "dogs@1[key <> 'a b']"]
    quoted = ["cats@1[key = 'a] b']", "dogs@1[key like '%[0-9]%' and \"label\"::int = 1]"]
    parts = make_config(repository, data=f"{quoted[0]}:0.5 {quoted[1]}:1/2").parse_data()
    assert [reference for reference, _ in parts] == quoted
    with pytest.raises(ConfigError, match="bracket that is not closed"):
        make_config(repository, data="cats@1[label in (0, 1)").parse_data()


def test_a_resumed_run_may_have_other_weights_ahead_and_not_behind(repository):
    settings = {
        "name": "staged",
        "data": "cats@1:0.75 dogs@1:0.25 birds@1:0",
        "mixture_block": 8,
        "epoch_samples": 64,
    }
    train(make_config(repository, **settings, stages="16: cats:1 dogs:1; 48: birds:1", max_steps=3))
    train(make_config(repository, **settings, stages="16: cats:1 dogs:1; 32: birds:1", max_steps=6))
    entry = describe_model(repository, "staged").entry
    assert (entry["parent"], entry["step"], entry["data"][0]["state"]["position"]) == ("staged@1", 6, 48)
    assert [stage["start"] for stage in entry["data"][0]["state"]["mixture"]["stages"]] == [16, 32]
    owls = find_consumers(repository, ["staged"], keys=keys_of(repository, "birds@1")).to_pandas()
    # The stage of birds, which was withdrawn from 48 on and begins at 32, has two batches of 8.
    assert sorted(owls["position"]) == list(range(32, 48))
    with pytest.raises(StateMismatchError, match="saved with the weights birds@1/train 1 from sample 32 on; this"):
        train(make_config(repository, **settings, stages="16: cats:1 dogs:1; 40: birds:1"))


def test_a_mixture_of_other_data_than_its_checkpoint_is_refused_by_the_names(repository):
    train(make_config(repository, name="of-cats", max_steps=1))
    with pytest.raises(StateMismatchError, match="was trained on cats@1, this run reads cats@1 and dogs@1"):
        train(make_config(repository, name="of-cats", data=MIXTURE))


def test_the_evaluation_of_a_mixture_has_each_sample_of_each_val_once(repository):
    config = make_config(repository, data=MIXTURE)
    repo = datasvc.open(repository.url)
    data = open_data(repo, config, resolve_data(repo, config))
    assert data.train.classes == data.val.classes == ("lion", "other", "wolf")
    task = Classification(config, data.train)
    with task.open_loader(
        data.val, training=False, batch_size=4, cache=None, place=choose_place_of_one(config)
    ) as loader:
        for _ in range(2):  # a second evaluation continues the loader
            labels = [int(label) for batch in loader for label in batch.labels[batch.mask]]
            assert np.bincount(labels).tolist() == [6, 5, 4]


def choose_place_of_one(config):
    import datasvc.trainer as hvd

    hvd.init()
    try:
        return choose_place(config, Layout())
    finally:
        hvd.shutdown()


def test_classes_of_val_with_other_numbers_than_those_of_training_are_refused(repository):
    repo = datasvc.open(repository.url)
    for data, is_refused in (("birds@1:1 cats@1:1", True), ("cats@1:1 birds@1:1", False)):
        config = make_config(repository, data=data)
        if is_refused:
            with pytest.raises(ConfigError, match="name the data sets that have one first"):
                open_data(repo, config, resolve_data(repo, config))
        else:
            assert open_data(repo, config, resolve_data(repo, config)).val.classes == ("lion", "other")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "data is ''"),
        ("cats@1 dogs@1", "data has 'cats@1'; expected each data set of a mixture as REFERENCE:WEIGHT"),
        ("cats@1:0.5 dogs@1:-1", "data has 'dogs@1:-1'"),
        ("cats@1:0.5 dogs@1:nan", "data has 'dogs@1:nan'"),
        ("cats@1:0.5 Dogs:0.5", "data is 'Dogs'"),
        ("cats@1:0.5", "data is 'cats@1:0.5'"),
    ],
)
def test_a_mixture_of_another_form_is_refused(repository, data, message):
    with pytest.raises(ConfigError, match=message):
        make_config(repository, data=data)


def test_settings_of_a_mixture_are_refused_without_one(repository):
    with pytest.raises(ConfigError, match="are settings of a mixture"):
        make_config(repository, epoch_samples=100)


def test_the_ledger_of_a_run_is_a_proof_also_after_it_is_continued(repository, tmp_path):
    folder = tmp_path / "ledger"
    for steps in (2, None):
        train(make_config(repository, name="recorded", ledger=str(folder), max_steps=steps))
    result = audit([list(read_ledger(folder))])
    assert result.is_proven
    assert [epoch.epoch for epoch in result.epochs] == [0]


def test_a_decode_group_a_jitter_and_a_transform_reach_the_loader(repository):
    config = make_config(
        repository,
        decode_group=f"test-{id(repository)}",
        jitter="0.4,0.3,0.2,0.1",
        transform=f"{__name__}:mirror",
        decode="pillow",
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        on_bad="mask",
    )
    split = datasvc.open(repository.url).dataset("cats@1")["train"]
    task = Classification(config, split)
    place = choose_place_of_one(config)
    with task.open_loader(split, training=True, batch_size=8, cache=None, place=place) as loader:
        batch = next(iter(loader))
        assert loader.sharing.counts.decoded == 1
        assert loader.state_dict()["decode"] == "pillow"
    plain = make_config(repository, jitter="0.4,0.3,0.2,0.1", decode="pillow")
    with Classification(plain, split).open_loader(
        split, training=True, batch_size=8, cache=None, place=place
    ) as loader:
        expected = next(iter(loader)).images
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    levels = (expected * std + mean).flip(-1)
    torch.testing.assert_close(batch.images * 0.25 + 0.5, levels, atol=1e-5, rtol=0)


def set_all(group, settings):
    """Return the settings, after a check that they have every setting of a group, with a value of its own."""
    for each in dataclasses.fields(group):
        assert settings.get(each.name, each.default) != each.default, each.name
    return settings


ORDER = set_all(OrderSettings, {"seed": 7, "shuffle": "windowed", "lanes": 2, "block": 4, "sticky": True})
PLACE = DataPlacement(rank=1, world_size=3, device=torch.device("cpu"), num_threads=5)


def test_every_setting_of_images_reaches_the_loader(repository, monkeypatch):
    calls = []
    monkeypatch.setattr(classification, "ImageLoader", lambda split, **options: calls.append((split, options)))
    images = set_all(
        ImageSettings,
        {
            "size": 16,
            "resize": 20,
            "evaluation": "window",
            "scale": (0.2, 0.9),
            "ratio": (0.5, 1.5),
            "flip": 0.25,
            "jitter": "0.4,0.3,0.2,0.1",
            "transform": f"{__name__}:mirror",
            "mean": (0.5, 0.4, 0.3),
            "std": (0.25, 0.2, 0.1),
        },
    )
    decoding = set_all(
        DecodeSettings,
        {
            "prefetch": 3,
            "decode": "pillow",
            "decode_threads": 5,
            "decode_servers": ("http://cpu1:8765",),
            "on_bad": "mask",
            "decode_scale": "full",
            "decode_group": "group",
            "decode_lag": 9,
            "tune_loader": True,  # what the training loop reads; not in a decode group
            "ledger": "folder",
        },
    )
    config = make_config(repository, **images, **decoding | {"tune_loader": False}, **ORDER, channels_last=True)
    split = datasvc.open(repository.url).dataset("cats@1")["train"]
    task = Classification(config, split)
    for training in (True, False):
        task.open_loader(split, training=training, batch_size=8, cache="the cache", place=PLACE)
    expected = {
        "batch_size": 8,
        "training": True,
        "cache": "the cache",
        "size": 16,
        "order": OrderConfig(7, "windowed", 2, 4, sticky=True),
        "ranks": DataRanks(1, 3),
        "pixels": PixelFormat(layout="NHWC", mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1)),
        "augment": AugmentConfig(
            scale=(0.2, 0.9),
            ratio=(0.5, 1.5),
            flip=0.25,
            brightness=0.4,
            contrast=0.3,
            saturation=0.2,
            hue=0.1,
            resize=20,
            evaluation="window",
            transform=mirror,
        ),
        "device": "cpu",
        "decode": DecodeConfig(
            "pillow",
            num_threads=5,
            prefetch=3,
            on_bad="mask",
            servers=("http://cpu1:8765",),
            decode_scale="full",
        ),
        "ledger": "folder",
        "decode_group": DecodeGroup("group", lag=9),
    }
    # An evaluation reads in the order of the table, for itself, and is not part of the ledger.
    of_evaluation = {"training": False, "order": OrderConfig(7, None), "ledger": None, "decode_group": None}
    assert calls == [(split, expected), (split, {**expected, **of_evaluation})]


def test_every_setting_of_tokens_reaches_the_loader(repository, monkeypatch):
    calls, split = [], SimpleNamespace(packs=None)  # `resolve_data` packs
    monkeypatch.setattr(language, "TokenLoader", lambda split, **options: calls.append((split, options)))
    tokens = set_all(
        TokenSettings,
        {
            "vocabulary": 11,
            "documents": True,
            "token_column": "words",
            "block_tokens": 6,
            "token_dtype": "uint16",
            "pad_token": 2,
            "end_token": 1,
            "pack": "best-fit",
            "too_long": "refuse",
            "loss_mask": "counted",
        },
    )
    loading = {"prefetch": 3, "ledger": "folder"}
    for changes in ({}, {"documents": False}):
        config = make_config(repository, model="gpt", **{**tokens, **loading, **ORDER, **changes})
        task = language.LanguageModelling(config, None)
        for training in (True, False):
            task.open_loader(split, training=training, batch_size=8, cache="the cache", place=PLACE)
    expected = {
        "batch_size": 8,
        "training": True,
        "cache": "the cache",
        "tokens": TokenFormat("words", block_tokens=6, dtype="uint16", pad=2, end=1),
        "labels": "within",
        "documents": True,
        "loss_mask": "counted",
        "order": OrderConfig(7, "windowed", 2, 4, sticky=True),
        "ranks": DataRanks(1, 3),
        "prefetch": 3,
        "ledger": "folder",
    }
    of_evaluation = {"training": False, "order": OrderConfig(7, None), "ledger": None}
    across = {"labels": "across", "documents": False}
    assert calls == [
        (split, {**expected, **kind, **changes}) for kind in ({}, across) for changes in ({}, of_evaluation)
    ]


def test_images_that_do_not_decode_are_left_out_of_the_loss(repository):
    split = datasvc.open(repository.url).dataset("cats@1")["train"]
    task = Classification(make_config(repository, on_bad="mask"), split)

    class Batch:
        images, labels = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
        mask = torch.tensor([True, True, False, True])

    examples = task.unpack(Batch, torch.device("cpu"))
    assert (task.targets_vary, task.count_targets(examples)) == (True, 3)
    expected = torch.nn.functional.cross_entropy(Batch.images[Batch.mask], Batch.labels[Batch.mask], reduction="sum")
    assert task.sum_loss(lambda images: images, examples).item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transform": "blur"}, "transform is 'blur'; expected 'module:function'"),
        ({"jitter": "1,2"}, "jitter is '1,2'; expected four numbers"),
        ({"jitter": "0,0,0,0.6"}, "hue is 0.6"),
        ({"std": (0.0, 1.0, 1.0)}, "std is "),
        ({"tenant": "b"}, "tenant is a tenant of a node cache"),
        ({"sticky": True}, "sticky needs a windowed shuffle"),
        ({"decode_group": "g", "prefetch": 9}, "prefetch is 9, and decode_lag is 6"),
        ({"decode_group": "g", "tune_loader": True}, "leave out --tune-loader or --decode-group"),
        ({"decode_group": ""}, "decode group is ''"),
        ({"decode": "fast"}, "decode is 'fast'; expected one of auto, cpu"),
    ],
)
def test_settings_of_the_loader_are_checked_before_anything_runs(repository, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config(repository, **settings)


def test_a_transform_that_does_not_exist_is_named(repository):
    split = datasvc.open(repository.url).dataset("cats@1")["train"]
    with pytest.raises(ConfigError, match=r"transform 'nowhere:blur': there is no module 'nowhere'"):
        Classification(make_config(repository, transform="nowhere:blur"), split)

"""What people try in their first hour with their own photos, tables and training loop."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import ImageLoader
from datasvc.shards import ingest, open_dataset
from datasvc.shards.images.header import read_header
from datasvc.shards.sources import SourceOptions
from tests.cli.command import run
from tests.samples import jpeg


def trained():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


@pytest.mark.parametrize("name", ["net", "optimizer", "schedule"])
@pytest.mark.parametrize("is_nested", [True, False])
def test_a_restore_into_objects_in_place_of_their_states_is_refused(tmp_path, name, is_nested):
    """mosaicml/composer#383: the objects stayed as they were, and the training began again with random weights."""
    models = datasvc.open(str(tmp_path), create=True).models
    saved = dict(zip(("net", "optimizer", "schedule"), trained(), strict=True))
    models.save("m", {key: value.state_dict() for key, value in saved.items()}, step=1)
    objects = dict(zip(saved, trained(), strict=True))
    before = objects["net"].weight.clone()
    into = {key: value.state_dict() for key, value in objects.items()} | {name: objects[name]}
    with pytest.raises(ConfigError, match=rf"{type(objects[name]).__name__}.*nothing was restored.*load_state_dict"):
        models.restore("m", into=into if is_nested else objects[name])
    assert torch.equal(objects["net"].weight, before)


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"\0\0\0\x14ftypqt  \0\0\0\0qt  ", "a video"),
        (b"%PDF-1.7\n", "a PDF document"),
    ],
)
def test_a_photo_whose_name_lies_about_its_format_is_named_by_its_format(start, what):
    """Esri/data-collection-ios#184: phones and web pages hand out videos and documents as .jpg."""
    with pytest.raises(BadSampleError, match=f"^{what}, which is not read.*convert it"):
        read_header(start + bytes(100))


def test_boolean_labels_become_0_and_1_on_request(tmp_path, repository):
    """dotnet/machinelearning#3283: the answer of a question with two answers, as a table has it."""
    labels = [True, False, None, True]
    table = pa.table({"image": [jpeg(seed=row) for row in range(4)], "label": labels})
    pq.write_table(table, tmp_path / "answers.parquet")
    source = str(tmp_path / "answers.parquet")
    ingest(repository, source, "answers", source_options=SourceOptions(label="label"), keep_order=True)
    split = open_dataset(repository, "answers")["train"]
    assert [split[row]["label"] for row in range(4)] == [1, 0, None, 1]
    table = table.set_column(1, "label", pa.array([0.25, 0.5, 0.75, 1.5]))
    pq.write_table(table, tmp_path / "answers.parquet")
    ingest(repository, source, "scores")
    with pytest.raises(
        ConfigError, match=r"is double; labels are integers, the indices of classes: request the values"
    ):
        ImageLoader(open_dataset(repository, "scores")["train"], batch_size=4, training=True)


def test_equal_file_names_in_two_splits_do_not_look_like_equal_samples(tmp_path, repository):
    """the-database/traiNNer-redux#63: `verify` said that all validation samples are in the training data."""
    for number, split in enumerate(("train", "val")):
        (tmp_path / "photos" / split / "cat").mkdir(parents=True)
        (tmp_path / "photos" / split / "cat" / "IMG_1.JPG").write_bytes(jpeg(seed=number))
    ingest(repository, str(tmp_path / "photos"), "photos")
    assert "1 key is in two splits: accepted" in run("verify", "photos", "--repo", repository.url).stdout


@pytest.mark.slow
def test_a_file_of_a_whole_module_is_refused_without_a_part_to_leave_out(tmp_path):
    """bioimage-io/core-bioimage-io-python#486: `torch.save(model)` needs the class of the model to be read."""
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    models = datasvc.open(str(tmp_path / "repo"), create=True).models
    with pytest.raises(
        ConfigError, match=r"is a torch.*Linear.*save plain values, such as model\.state_dict\(\)"
    ) as error:
        models.import_(str(tmp_path / "whole.pt"), "m")
    assert "(root)" not in str(error.value)

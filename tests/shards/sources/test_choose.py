"""Which source reads a URL, and which options it takes."""

import pytest

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards import ingest, open_dataset
from datasvc.shards.ingestion.ingest import open_any_source
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.choose import open_source
from tests.samples import jpeg


@pytest.mark.parametrize(
    ("option", "value", "formats"),
    [
        ("ground_truth", "nofile", "imagenet"),
        ("synsets", "nofile", "imagenet"),
        ("tokenizer", "nofile", "tokens"),
        ("chat_template", "nofile", "chats"),
        ("block_tokens", 512, "tokens"),
        ("text", "content", "tokens"),
        ("key", "id", "parquet and arrow and csv and .*"),
    ],
)
def test_an_option_that_the_format_does_not_use_is_refused_with_the_formats_that_do(folder, option, value, formats):
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(
        ConfigError, match=rf"{flag} \({option}=\) is for {formats}, but .* has the format image-folder"
    ):
        open_source(str(folder), SourceOptions(**{option: value}))
    open_source(str(folder), SourceOptions(split="train", key_prefix="a/"))


def test_an_iterable_takes_only_a_split_a_key_and_a_key_prefix():
    options = SourceOptions(split="val", key="id", key_prefix="a/")
    assert open_any_source([{"id": "1"}], options).kind == "python"
    for other in (SourceOptions(format="csv"), SourceOptions(manifest="m.csv"), SourceOptions(text="words")):
        with pytest.raises(ConfigError, match="iterable"):
            open_any_source([{"id": "1"}], other)


def test_an_image_or_a_pattern_of_images_is_a_source(repository, tmp_path):
    for name in ("a.jpg", "b.jpg", "c.png"):
        (tmp_path / name).write_bytes(jpeg(seed=ord(name[0])))
    assert ingest(repository, str(tmp_path / "a.jpg"), "one").num_samples == {"train": 1}
    assert open_dataset(repository, "one")["train"][0]["key"] == "a.jpg"
    assert ingest(repository, str(tmp_path / "*.jpg"), "two").num_samples == {"train": 2}
    assert ingest(repository, str(tmp_path / "{a,b}.jpg"), "braces").num_samples == {"train": 2}
    (tmp_path / "m.csv").write_text("file,label\na.jpg,1\n")
    manifest = SourceOptions(manifest=str(tmp_path / "m.csv"))
    assert ingest(repository, str(tmp_path / "a.jpg"), "listed", source_options=manifest).num_samples == {"train": 1}


def test_a_file_of_another_format_is_not_called_a_missing_folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(NotFoundError, match=r"no images among its 1 file"):
        open_source(str(tmp_path / "rows.jsonl"), SourceOptions(format="image-folder"))
    with pytest.raises(NotFoundError, match=r"there is no file or folder at .*none\.jpg"):
        open_source(str(tmp_path / "none.jpg"))

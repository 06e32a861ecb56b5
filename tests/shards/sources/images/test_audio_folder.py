"""Sounds from folders, manifests, tars and `Audio` columns: columns, checks and round trips."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import BadSampleError, ConfigError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.export.exporter import export
from datasvc.shards.format.schema import is_audio
from datasvc.shards.history.columns import drop_column
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.choose import open_source
from datasvc.shards.sources.images.image_folder import AudioFolderSource
from tests.shards.sources.source_laws import ListedSourceLaws
from tests.support.sounds import FORMATS, encode, ingest_files, noise, write_files

MEASURED = ["rate", "channels", "frames", "duration"]
FILES = {
    f"train/{'up' if number % 2 else 'down'}/{number}.{extension}": encode(
        noise(4_800 + number, 1 + number % 2), 48_000, extension
    )
    for number, extension in enumerate(FORMATS)
}


class TestAudioFolderSource(ListedSourceLaws):
    source = AudioFolderSource

    def write(self, folder, numbers):
        for number in numbers:
            (folder / f"{number:03d}.wav").write_bytes(encode(noise(1_000 + number)))


@pytest.fixture
def repository(tmp_path):
    return Repository.create(str(tmp_path / "repo"))


def measured(split):
    return {sample["key"]: [sample[name] for name in MEASURED] for sample in split[:]}


def test_a_folder_has_measured_sounds_in_classes(repository, tmp_path):
    split = ingest_files(repository, tmp_path / "files", FILES)
    assert split.table.sample_schema.names == ["key", "audio", *MEASURED, "label"]
    assert split.classes == ("down", "up")
    values = measured(split)
    assert values["up/1.flac"] == [48_000, 2, 4_801, 4_801 / 48_000]
    assert {key: rate for key, (rate, *_) in values.items()} == dict.fromkeys(values, 48_000)
    assert split[0]["audio"] == FILES[f"train/{split[0]['key']}"]


def test_damaged_files_are_named_and_left_out_or_refused(repository, tmp_path):
    files = FILES | {
        "train/up/bad.wav": FILES["train/down/0.wav"][:500],
        "train/up/none.mp3": b"",
        "train/a.txt": b"",
    }
    with pytest.raises(BadSampleError, match=r"up/bad\.wav.*truncated"):
        ingest_files(repository, tmp_path / "files", files)
    split = ingest_files(repository, tmp_path / "files", files, on_bad="skip")
    assert len(split) == len(FILES)


@pytest.mark.parametrize("name", ["manifest.csv", "manifest.jsonl"])
def test_a_manifest_gives_texts_and_labels_and_its_own_columns_get_another_name(repository, tmp_path, name):
    source = write_files(tmp_path / "files", FILES)
    rows = [{"path": path, "text": f"say {path}", "label": path.split("/")[1], "duration": 9.5} for path in FILES]
    lines = [json.dumps(row) for row in rows]
    if name.endswith(".csv"):
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (tmp_path / name).write_text("\n".join(lines))
    ingest(repository, str(source), "said", source_options=SourceOptions(manifest=str(tmp_path / name)))
    split = open_dataset(repository, "said")["train"]
    assert split.table.sample_schema.names == ["key", "audio", *MEASURED, "label", "text", "source_duration"]
    assert {(s["key"], s["text"], s["source_duration"]) for s in split[:]} == {(p, f"say {p}", 9.5) for p in FILES}
    assert split.classes == ("down", "up")


def test_sounds_of_a_tar_are_the_column_audio(repository, tmp_path):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number, content in enumerate(FILES.values()):
            extension = [*FORMATS][number]
            for name, member in (
                (f"{number}.{extension}", content),
                (f"{number}.cls", b"1"),
                (f"{number}.rate", b"x"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(member)
                tar.addfile(info, io.BytesIO(member))
    ingest(repository, str(tmp_path / "train-0.tar"), "tar")
    split = open_dataset(repository, "tar")["train"]
    assert split.table.sample_schema.names == ["key", "audio", *MEASURED, "label", "source_rate"]
    assert sorted(sample["audio"] for sample in split[:]) == sorted(FILES.values())


@pytest.mark.parametrize("is_declared", [True, False])
def test_audio_columns_of_hugging_face_are_sounds(tmp_path, is_declared):
    files = [each for name, each in FILES.items() if name.endswith(".mp3") == is_declared]
    table = pa.table({"speech": [{"bytes": each, "path": "x.wav"} for each in files], "sentence": ["a"] * len(files)})
    features = {"info": {"features": {"speech": {"_type": "Audio", "sampling_rate": 16_000}}}}
    if is_declared:  # otherwise its first bytes say so
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    source = open_source(str(tmp_path), SourceOptions(format="huggingface"))
    assert source.schema.names == ["key", "audio", "sentence"]
    assert is_audio(source.schema.field("audio"))


@pytest.mark.parametrize("export_format", ["parquet", "webdataset"])
def test_an_exported_version_is_ingested_with_the_same_samples(repository, tmp_path, export_format):
    split = ingest_files(repository, tmp_path / "files", FILES)
    export(repository, "sounds@1", str(tmp_path / "out"), export_format)
    ingest(repository, str(tmp_path / "out"), "again", keep_order=True)
    again = open_dataset(repository, "again")["train"]
    assert [name for name in again.table.sample_schema.names if name in MEASURED] == MEASURED
    found = {(sample["audio"], sample["frames"]) for sample in again[:]}
    assert found == {(sample["audio"], sample["frames"]) for sample in split[:]}


def test_measured_columns_are_no_part_of_what_a_sample_is(repository, tmp_path):
    """Another libsndfile may count the frames of an MP3 in another way; the sample is the same."""
    ingest_files(repository, tmp_path / "files", FILES)
    ingest_files(repository, tmp_path / "files", FILES, "twin")
    first, second = (open_dataset(repository, name)["train"] for name in ("sounds", "twin"))
    assert first.digest == second.digest
    with pytest.raises(ConfigError, match="follow from the stored samples"):
        drop_column(repository, "sounds", "rate")

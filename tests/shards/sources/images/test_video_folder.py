"""Folders, manifests and tars of videos become a column of files, with an index of their frames."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from datasvc.errors import ConfigError
from datasvc.loaders import VideoLoader
from datasvc.loaders.video.clips import read_frame_index
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.export import export
from datasvc.shards.sources import SourceOptions
from datasvc.shards.video.video_file import decode_frames
from tests.support.videos import decode_all, video

NAMES = {"cats/a.mp4": "h264", "cats/b.mkv": "h264-open-gop-mkv", "dogs/c.webm": "vp9", "dogs/d.AVI": "h264-avi"}


@pytest.fixture
def repository(tmp_path):
    return Repository.create(str(tmp_path / "repo"))


@pytest.fixture
def folder(tmp_path):
    for name, kind in NAMES.items():
        path = tmp_path / "videos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(video(kind))
    (tmp_path / "videos" / "README.txt").write_text("notes")
    return tmp_path / "videos"


def samples_of(repository, name="clips"):
    split = open_dataset(repository, name)["train"]
    return split, {sample["key"]: sample for sample in split}


def test_a_folder_of_classes_has_files_and_what_is_measured(repository, folder):
    ingest(repository, str(folder), "clips")
    split, samples = samples_of(repository)
    assert split.classes == ("cats", "dogs")
    assert samples.keys() == NAMES.keys()
    for key, kind in NAMES.items():
        sample = samples[key]
        assert sample["video"] == video(kind)
        assert (sample["video_width"], sample["video_height"], sample["video_frames"]) == (96, 64, 60)
        assert sample["video_codec"] == kind.split("-")[0]
        assert sample["video_fps"] == pytest.approx(25, abs=0.01)
    assert len(samples["cats/a.mp4"]["video_pts"]) == 60
    assert samples["cats/a.mp4"]["video_key_frames"][1].keys() == {"pts", "dts", "offset"}
    assert samples["dogs/d.AVI"]["video_key_frames"] == []
    (batch,) = VideoLoader(split, batch_size=4, training=False, frames=2, size=32)
    assert sorted(batch.labels.tolist()) == [0, 0, 1, 1]


def test_the_stored_index_finds_frames(repository, folder):
    ingest(repository, str(folder), "clips")
    split, _ = samples_of(repository)
    shard = split.origin.open_shard(split.table.shard(0))
    for row in range(shard.num_samples):
        (content,) = shard.blobs("video", np.array([row]))
        expected = decode_all(content.tobytes())
        for number, pixels in decode_frames(content, read_frame_index(shard, row), [40, 42], shard.read):
            np.testing.assert_array_equal(pixels, expected[number])


def test_bad_files_are_named_and_left_out(repository, folder):
    (folder / "cats" / "broken.mp4").write_bytes(video("h264")[:5000])
    (folder / "dogs" / "page.mp4").write_bytes(b"<html>404</html>")
    result = ingest(repository, str(folder), "clips", on_bad="skip")
    _, samples = samples_of(repository)
    assert samples.keys() == NAMES.keys()
    assert {bad.key for bad in result.bad} == {"cats/broken.mp4", "dogs/page.mp4"}


def test_a_tar_has_videos_beside_pictures_and_texts(repository, tmp_path):
    tar = tmp_path / "0.tar"
    with tarfile.open(tar, "w") as file:
        for number, kind in enumerate(("h264", "vp9", "mpeg4")):
            for extension, content in (
                ("mp4" if kind != "vp9" else "webm", video(kind)),
                ("txt", b"a clip"),
                ("cls", str(number).encode()),
            ):
                info = tarfile.TarInfo(f"{number:03}.{extension}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    ingest(repository, str(tar), "clips")
    split, samples = samples_of(repository)
    assert [samples[key]["video_codec"] for key in sorted(samples)] == ["h264", "vp9", "mpeg4"]
    assert samples["001"]["video"] == video("vp9")
    (batch,) = VideoLoader(split, batch_size=3, training=False, frames=2, size=32, columns=["txt", "video_fps"])
    assert batch.columns["txt"] == ["a clip"] * 3
    assert batch.columns["video_fps"].tolist() == pytest.approx([25] * 3, abs=0.01)


def test_an_exported_tar_is_ingested_again(repository, folder, tmp_path):
    ingest(repository, str(folder), "clips")
    export(repository, "clips@1", str(tmp_path / "tars"), "webdataset")
    ingest(repository, str(tmp_path / "tars"), "again")
    first, second = samples_of(repository)[1], samples_of(repository, "again")[1]
    assert {key: each["video"] for key, each in second.items()} == {key: each["video"] for key, each in first.items()}
    assert {each["video_codec"] for each in second.values()} == {"h264", "vp9"}


def test_a_manifest_lists_videos(repository, folder, tmp_path):
    (tmp_path / "list.csv").write_text("video,label,video_fps\ncats/a.mp4,3,x\ndogs/c.webm,5,y\n")
    ingest(repository, str(folder), "clips", source_options=SourceOptions(manifest=str(tmp_path / "list.csv")))
    _, samples = samples_of(repository)
    assert {sample["label"] for sample in samples.values()} == {3, 5}
    assert samples["cats/a.mp4"]["source_video_fps"] == "x"


def test_an_exported_table_of_videos_is_measured_again(repository, folder, tmp_path):
    ingest(repository, str(folder), "clips")
    export(repository, "clips@1", str(tmp_path / "tables"), "parquet")
    ingest(repository, str(tmp_path / "tables"), "again")
    assert samples_of(repository, "again")[1] == samples_of(repository)[1]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_of_hugging_face_that_is_declared_as_videos_is_measured(repository, tmp_path, suffix):
    features = {"info": {"features": {"clip": {"_type": "Video"}}}}
    table = pa.table({"clip": [{"bytes": video("vp9"), "path": "c.webm"}], "video_fps": [5.0]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    path = str(tmp_path / f"clips.{suffix}")
    pq.write_table(table, path) if suffix == "parquet" else feather.write_feather(table, path)
    ingest(repository, path, "clips")
    (sample,) = samples_of(repository)[1].values()
    assert sample["video"] == video("vp9")
    assert (sample["video_codec"], sample["video_frames"], sample["source_video_fps"]) == ("vp9", 60, 5.0)


def test_bytes_that_no_ingest_has_checked_are_refused(repository):
    ingest(repository, [{"video": video("h264"), "label": 0}], "clips")
    split, _ = samples_of(repository)
    assert split.table.sample_schema.field("video").type == pa.large_binary()
    with pytest.raises(ConfigError, match="no ingest has checked"):
        VideoLoader(split, batch_size=1, training=True)

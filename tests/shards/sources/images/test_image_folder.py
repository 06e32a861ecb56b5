"""What the names below an image folder say of its files."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from datasvc.shards.sources.images import image_folder
from datasvc.shards.sources.images.image_folder import ImageFolderSource
from tests.samples import jpeg
from tests.shards.sources.source_laws import ListedSourceLaws


class TestImageFolderSource(ListedSourceLaws):
    source = ImageFolderSource

    def write(self, folder, numbers):
        for number in numbers:
            (folder / f"{number:03d}.jpg").write_bytes(jpeg(seed=number))


@given(st.text("./aJpg", max_size=12))
def test_extensions_are_what_the_standard_library_says(name):
    assert image_folder._extension(name) == os.path.splitext(name)[1].lower()


def test_keys_begin_below_the_split_and_classes_are_the_folders_there(tmp_path):
    names = ["Train/b/2.jpg", "Train/b/deep/1.jpg", "Train/a/3.PNG", "val/b/2.jpg", "val/c/.jpg", "val/c/x.b/4.jpeg"]
    for name in names:
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    listed = ImageFolderSource.list(str(tmp_path))
    assert listed.classes == ("a", "b", "c")
    assert {split: [(file.key, file.label) for file in files] for split, files in listed.splits.items()} == {
        "train": [("a/3.PNG", 0), ("b/2.jpg", 1), ("b/deep/1.jpg", 1)],
        "val": [("b/2.jpg", 1), ("c/x.b/4.jpeg", 2)],
    }
    assert listed.ignored == {"hidden .jpg": 1}
    for file in (file for files in listed.splits.values() for file in files):
        assert Path(file.path).read_bytes().decode().lower().endswith(file.key.lower())
        assert (file.size_bytes, file.stamp) == (os.stat(file.path).st_size, str(os.stat(file.path).st_mtime_ns))

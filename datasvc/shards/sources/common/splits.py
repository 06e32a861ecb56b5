"""Derives the split of a file, such as "train" or "val", from the names of its folders or its own name."""

from __future__ import annotations

import re
from typing import Final

SPLIT_NAMES: Final = frozenset({"train", "val", "valid", "validation", "test"})
DEFAULT_SPLIT: Final = "train"
HELD_OUT_SPLIT: Final = "val"  # split of the samples that an ingest holds out of the default split
# The name of a split as a whole word of a file name: between separators, or before a digit.
_SPLIT_WORD: Final = re.compile(rf"(.*[-_.])?({'|'.join(SPLIT_NAMES)})([-_.\d].*)?")


def split_of(name: str) -> str:
    """Return the split of the file `name`, a path below the source's root.

    The first folder with the name of a split decides. If there is none, the last such word of the file name decides,
    as in `data/validation-00000-of-00004.parquet` or `pets-train-000.tar`. The default is "train".
    """
    folders, _, file_name = name.rpartition("/")
    for folder in folders.split("/"):
        if folder.lower() in SPLIT_NAMES:
            return folder.lower()
    match = _SPLIT_WORD.fullmatch(file_name.lower())
    return match[2] if match else DEFAULT_SPLIT

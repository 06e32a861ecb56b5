"""Options for reading a source, as a user gives them on the command line or to `ingest`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import check_name

SPLIT_NAMES: Final = frozenset({"train", "val", "valid", "validation", "test"})
DEFAULT_SPLIT: Final = "train"
HELD_OUT_SPLIT: Final = "val"  # split of the samples that an ingest holds out of the default split
# The name of a split as a whole word of a file name: between separators, or before a digit.
_SPLIT_WORD: Final = re.compile(rf"(.*[-_.])?({'|'.join(SPLIT_NAMES)})([-_.\d].*)?")


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source. `open_source` refuses an option that the format of the source does not use.

    Attributes:
        format: kind of the source, such as "webdataset"; None: detected from its files.
        split: split of all samples; None: taken from the names of folders and files.
        key: column that holds the keys; None: the column "key" if there is one, else keys are made of file and row.
        manifest: for image folders: URL of a CSV, JSON lines or Parquet file of files, labels and other columns.
        ground_truth: for ImageNet validation: URL of `ILSVRC2012_validation_ground_truth.txt`.
        synsets: for ImageNet validation: URL of the synset list of the devkit as a text file (not `meta.mat`), one
            synset per line in the order of the ILSVRC ids.
        tokenizer: for text: URL of the Hugging Face `tokenizer.json` that makes the tokens.
        chat_template: for JSON lines of conversations: URL of the folder of a Hugging Face tokenizer with a chat
            template, which makes tokens and a loss mask of the column "messages".
        block_tokens: for text: tokens per block.
        text: for text: column of JSON lines that holds the text to tokenize.
        label: column that holds the labels, as whole numbers, booleans or class names; None: the column "label", or
            an integer column of a usual name. Text in a column "label" beside images is class names too.
        as_text: columns that keep their values: those of CSV are not converted to numbers, dates or booleans, and a
            column "label" becomes neither classes nor integers.
        as_bytes: for WebDataset: fields of images, sounds or videos, such as "mp4", that stay bytes, without a check.
        key_prefix: text put before the key of every sample, so that two sources with equal keys fit one data set.
        first_frame: for image folders: GIF files are samples too, of which loaders decode the first frame.

    Raises:
        ConfigError: `split` is not a valid name, a number is out of range, or `key_prefix` is not UTF-8.
    """

    format: str | None = None
    split: str | None = None
    key: str | None = None
    manifest: str | None = None
    ground_truth: str | None = None
    synsets: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    block_tokens: int = 1024
    text: str = "text"
    key_prefix: str = ""
    label: str | None = None
    as_text: tuple[str, ...] = ()
    as_bytes: tuple[str, ...] = ()
    first_frame: bool = False

    def __post_init__(self) -> None:
        if self.split is not None:
            check_name(self.split, "split")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}; expected at least 1")
        check_key_prefix(self.key_prefix)


def check_key_prefix(prefix: str) -> str:
    """Return `prefix` if keys may start with it. Raise ConfigError if it is not UTF-8."""
    try:
        prefix.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the key prefix {prefix!r} is not UTF-8; expected text, such as 'extra/'") from error
    return prefix


def split_of_file(name: str, options: SourceOptions) -> str:
    """Return the split of the samples in the file `name`: that of `options`, else the one in its name."""
    return options.split or split_of(name)


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

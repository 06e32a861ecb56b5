"""What a user may say about a source beside where it is."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import check_name


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source. Every source takes what concerns it and leaves the rest.

    Attributes:
        format: kind of the source, such as "webdataset"; None: by what is there.
        split: put all samples into this split; None: as folders and file names say.
        key: column that holds the keys; None: a column called `key`, else keys are made from file and row.
        manifest: image folder: URL of a CSV, JSON lines or Parquet file that names files, labels and more columns.
        ground_truth: ImageNet validation: URL of `ILSVRC2012_validation_ground_truth.txt`.
        synsets: ImageNet validation: URL of the devkit's synset list, `meta.mat` left aside: a text file of one
            synset a line in the order of the ILSVRC ids.
        tokenizer: text to token blocks: URL of a Hugging Face `tokenizer.json`.
        block_tokens: tokens per block.
        text: column of JSON lines that holds the text to tokenize.

    Raises:
        ConfigError: a split cannot be called so, or a number is out of range.
    """

    format: str | None = None
    split: str | None = None
    key: str | None = None
    manifest: str | None = None
    ground_truth: str | None = None
    synsets: str | None = None
    tokenizer: str | None = None
    block_tokens: int = 1024
    text: str = "text"

    def __post_init__(self) -> None:
        if self.split is not None:
            check_name(self.split, "split")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}; expected at least 1")

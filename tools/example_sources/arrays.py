"""Arrays and texts: numpy's files, and documents with a tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .contents import HELD_OUT, TRAIN, Contents

END_OF_TEXT = "<|endoftext|>"
_HELD_OUT_TEXT = "wine"


def write_npy(folder: Path, contents: Contents) -> None:
    """Write `SPLIT_images.npy` and `SPLIT_labels.npy`."""
    folder.mkdir(parents=True)
    for split in (TRAIN, HELD_OUT):
        digits = contents.digits_of(split)
        np.save(folder / f"{split}_images.npy", np.stack([digit.levels for digit in digits]))
        np.save(folder / f"{split}_labels.npy", np.array([digit.label for digit in digits]))


def write_npz(folder: Path, contents: Contents) -> None:
    """Write one archive with the names that Keras gives them: `x_train`, `y_train`, `x_test`, `y_test`."""
    folder.mkdir(parents=True)
    arrays = {}
    for split, digits in (("train", contents.digits_of(TRAIN)), ("test", contents.digits_of(HELD_OUT))):
        arrays[f"x_{split}"] = np.stack([digit.levels for digit in digits])
        arrays[f"y_{split}"] = np.array([digit.label for digit in digits], np.uint8)
    np.savez_compressed(folder / "digits.npz", **arrays)


def write_texts(folder: Path, contents: Contents) -> None:
    """Write `SPLIT/NAME.txt`."""
    for name, text in contents.texts.items():
        target = folder / _text_split(name) / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def write_text_lines(folder: Path, contents: Contents) -> None:
    """Write the paragraphs of the texts as JSON lines with `text` and where it is from."""
    folder.mkdir(parents=True)
    for split in (TRAIN, HELD_OUT):
        lines = [
            json.dumps({"text": paragraph, "source": name})
            for name, text in contents.texts.items()
            if _text_split(name) == split
            for paragraph in paragraphs(text)
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def write_tokenizer(path: Path) -> None:
    """Write a `tokenizer.json` whose tokens are single bytes, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    path.write_text(json.dumps(json.loads(tokenizer.to_str()), indent=1, sort_keys=True))


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text."""
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]


def _text_split(name: str) -> str:
    return HELD_OUT if name == _HELD_OUT_TEXT else TRAIN

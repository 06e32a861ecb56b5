"""Read the labels of ImageNet's validation images from the ground truth and the synset list of the devkit.

A synset is the name of a class, such as n01440764; the devkit is the development kit that ImageNet distributes with
its tars. `ImageNetSource` orders the classes alphabetically by synset, as is usual for class folders; a label is an
index in this order. The synset list of the devkit has another order. The ILSVRC id of a synset is its line number in
that list, from 1. Line i of the ground truth is the ILSVRC id of image i.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.options import SourceOptions

SYNSET: Final = re.compile(r"n\d{8}")

_DEVKIT: Final = "ILSVRC2012_devkit_t12/data"
_GROUND_TRUTH: Final = "ILSVRC2012_validation_ground_truth.txt"
_SYNSETS: Final = ("synsets.txt", "synset_words.txt", "LOC_synset_mapping.txt")
_NUM_CLASSES: Final = 1000
_HOW_TO_LIST: Final = (
    "write the list from the devkit's meta.mat: python -c \"import scipy.io; print('\\n'.join(s[0][1][0] for s in "
    "scipy.io.loadmat('meta.mat')['synsets'][:1000]))\" > synsets.txt"
)


def read_synsets(folder: str, reader: FileReader, options: SourceOptions) -> list[str]:
    """Return the synsets in the order of the ILSVRC ids, from the file in `options` or in `folder`.

    The synset is the first word of a line. Only the first 1,000 lines, the classes, are used; the lines after them
    list the inner nodes of the hierarchy of synsets.

    Args:
        folder: path of the folder that holds the tars.
        reader: reader of the source.
        options: options of the source.

    Raises:
        NotFoundError: there is no such file; the message tells how to get one.
        ConfigError: the list is empty or in alphabetical order, or a line is not a synset or repeats one.
    """
    advice = f"--synsets, a list of synsets; {_HOW_TO_LIST}"
    location, text = _read_text(options.synsets, folder, reader, _SYNSETS, advice)
    # An empty line gives "", which is refused below with its line number.
    synsets = [(line.split() or [""])[0] for line in text.rstrip().splitlines()][:_NUM_CLASSES]
    numbers: dict[str, int] = {}
    for number, synset in enumerate(synsets, 1):
        if not SYNSET.fullmatch(synset):
            raise ConfigError(f"line {number} of {location} starts with {synset!r}; expected a synset like n01440764")
        if synset in numbers:
            raise ConfigError(f"{location} has {synset} twice, in lines {numbers[synset]} and {number}")
        numbers[synset] = number
    if not synsets:
        raise ConfigError(f"{location} is empty; expected one synset per line, such as n01440764")
    # Caffe and Kaggle distribute alphabetical lists. With these, the devkit's ids would give wrong labels.
    if len(synsets) == _NUM_CLASSES and synsets == sorted(synsets):
        raise ConfigError(
            f"{location} lists the synsets in alphabetical order, but the ground truth uses the order of the "
            f"devkit, which starts with n02119789: every label would be wrong; use the devkit's list: {_HOW_TO_LIST}"
        )
    return synsets


def read_ground_truth(folder: str, reader: FileReader, options: SourceOptions) -> list[int]:
    """Return the ILSVRC ids of the validation images; for arguments and errors, see `read_synsets`."""
    advice = f"--ground-truth, the devkit's {_GROUND_TRUTH}"
    location, text = _read_text(options.ground_truth, folder, reader, (_GROUND_TRUTH,), advice)
    ids = []
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        word = line.strip()
        # No id has ten digits, and `int` refuses very long texts.
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise ConfigError(f"line {number} of {location} is {line[:40]!r}; expected one ILSVRC id, such as 490")
        ids.append(int(word))
    if not ids:
        raise ConfigError(f"{location} is empty; expected one ILSVRC id per line")
    return ids


def labels_of(ids: Sequence[int], synsets: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the label of each image.

    Args:
        ids: ILSVRC ids of the images; id 1 is the first of `synsets`.
        synsets: synsets in the order of the ids.
        classes: the same synsets in the order of the labels.

    Raises:
        ConfigError: an id is beyond `synsets`, or `synsets` and `classes` differ.
    """
    if set(synsets) != set(classes):
        differing = sorted(set(synsets) ^ set(classes))
        raise ConfigError(
            f"the synset list has {len(synsets)} classes, the training tar {len(classes)}; {len(differing)} are in "
            f"only one of them, such as {differing[0]}; use the list that belongs to this tar"
        )
    label_of_synset = {synset: label for label, synset in enumerate(classes)}
    labels = [label_of_synset[synset] for synset in synsets]  # label of the id `index + 1`
    for number, ilsvrc_id in enumerate(ids, 1):
        if not 1 <= ilsvrc_id <= len(labels):
            raise ConfigError(
                f"line {number} of the ground truth is the id {ilsvrc_id}, but the synset list has {len(labels)} "
                "lines; use the list that belongs to it"
            )
    return [labels[ilsvrc_id - 1] for ilsvrc_id in ids]


def _read_text(
    url: str | None, folder: str, reader: FileReader, names: Sequence[str], advice: str
) -> tuple[str, str]:
    """Return location and text of the file at `url`; without a URL, of the first of `names` that exists.

    `names` are looked up in `folder` and in the devkit's folder below it.
    Raise NotFoundError if none exists; its message names the option to give (`advice`).
    """
    if url is not None:
        reader = FileReader(url)
        return redact_url(url), _decoded(reader.read(reader.root), redact_url(url), advice)
    for name in names:
        for subfolder in ("", f"{_DEVKIT}/"):
            path = f"{folder}/{subfolder}{name}"
            try:
                return reader.location(path), _decoded(reader.read(path), reader.location(path), advice)
            except NotFoundError:
                continue
    raise NotFoundError(
        f"the validation images have no labels: no {' or '.join(names)} in {reader.location(folder)} or its "
        f"{_DEVKIT}; give {advice}"
    )


def _decoded(content: bytes, location: str, advice: str) -> str:
    """Return the text of a file, with or without a byte order mark. Raise ConfigError if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location} is not a text file: {error}; give {advice}") from error

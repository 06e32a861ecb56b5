"""The groups of settings of the data: what a run trains on, its tokens or sounds, and its order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Final, Literal

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import parse_reference, split_selection, split_words
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup, Words, naming

_STAGE: Final = re.compile(r"(?P<ramp>ramp to )?(?P<samples>[0-9][0-9_]*):\s+(?P<weights>\S.*)")


@dataclass(frozen=True, kw_only=True)
class DataSettings(SettingGroup):
    """Which data a run trains on.

    Attributes:
        data: data-set reference, such as "digits@1"; resolved once, at the start of the run. Several with weights are
            a mixture: "digits@1:0.8 letters@2:0.2". A weight is the share of the samples that are trained on.
            A condition in brackets, or the name of a view, selects samples: "pets@3[label != 'cat']".
        repo: repository URL.
        mixture_block: samples of a mixture over which the shares are exact; see `Mixture`.
        epoch_samples: samples of an epoch of a mixture; None: the samples of its data sets with a weight in `data`.
        stages: later weights of a mixture, such as "1_000_000: web:1 books:1; ramp to 2_000_000: books:1". A number
            is that of samples, over all epochs; after "ramp to" the weights change linearly until then. Data sets are
            named as in `data`, with or without their versions; those that a stage does not name are not read.
    """

    title: ClassVar[str] = "data"

    data: Annotated[str, Metavar("NAME@VERSION[:WEIGHT]"), Words()]
    repo: Annotated[str, Metavar("URL")]
    mixture_block: Annotated[int, Metavar("SAMPLES"), Range(1)] = 4096
    epoch_samples: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None
    stages: Annotated[str | None, Metavar("SAMPLES: NAME:WEIGHT ...; ...")] = None

    def check(self) -> None:
        """Check the form of references and weights."""
        parts = self.parse_data()
        for reference, _ in parts:
            with naming("data", reference):
                parse_reference(split_selection(reference)[0])
        self.parse_stages()
        defaults = (DataSettings.mixture_block, DataSettings.epoch_samples, DataSettings.stages)
        if len(parts) == 1 and (self.mixture_block, self.epoch_samples, self.stages) != defaults:
            raise ConfigError(
                "mixture_block, epoch_samples and stages are settings of a mixture; give --data several data sets "
                "with weights, such as --data digits@1:0.8 letters@2:0.2"
            )

    def parse_data(self) -> tuple[tuple[str, Fraction], ...]:
        """Return reference and weight of each data set; the weight is 1 if there is only one.

        Raises:
            ConfigError: a part of a mixture has no weight, or one that is not a finite number of 0 or more.
        """
        words = split_words(self.data)
        if len(words) < 2:
            return ((self.data.strip(), Fraction(1)),)
        return tuple(_parse_parts(words, "data"))

    def parse_stages(self) -> list[tuple[int, tuple[Fraction, ...], bool]]:
        """Return samples, weights of the data sets of `data` and whether it is a ramp, of each later stage.

        Raises:
            ConfigError: a stage has another form, or names something else than one of the data sets.
        """
        references = [reference for reference, _ in self.parse_data()]
        stages = []
        for text in filter(None, map(str.strip, (self.stages or "").split(";"))):
            match = _STAGE.fullmatch(text)
            if match is None:
                raise ConfigError(
                    f"stages has {text!r}; expected stages as SAMPLES: NAME:WEIGHT ..., with semicolons between "
                    "them, such as '1_000_000: web:1 books:1; ramp to 2_000_000: books:1'"
                )
            weights = [Fraction(0)] * len(references)
            for name, weight in _parse_parts(split_words(match["weights"]), "stages"):
                named = [
                    number for number, each in enumerate(references) if name in (each, re.split("[@[]", each)[0])
                ]
                if len(named) != 1 or weights[named[0]]:
                    raise ConfigError(
                        f"stages has {name!r} in {text!r}; expected one of the data sets {', '.join(references)}, "
                        "once"
                    )
                weights[named[0]] = weight
            stages.append((int(match["samples"]), tuple(weights), match["ramp"] is not None))
        return stages


def _parse_parts(words: Sequence[str], setting: str) -> list[tuple[str, Fraction]]:
    """Return reference and weight of the data sets of a mixture. Raises ConfigError: one has another form."""
    parts = []
    for word in words:
        # From the right, because a reference such as digits@best:val_loss has colons too.
        reference, _, weight = word.rpartition(":")
        if "]" in weight:  # a colon of a condition
            reference, weight = word, ""
        try:
            parts.append((reference, _parse_weight(weight)))
        except (ValueError, OverflowError, ZeroDivisionError):
            parts.append((reference, Fraction(-1)))
        if not reference or parts[-1][1] < 0:
            raise ConfigError(
                f"{setting} has {word!r}; expected each data set of a mixture as REFERENCE:WEIGHT, such as "
                "digits@1:0.8, with a finite weight of 0 or more"
            )
    return parts


def _parse_weight(text: str) -> Fraction:
    """Return a weight. Raises ValueError, OverflowError or ZeroDivisionError: it is not a finite number."""
    # Checked before it is a fraction, which for 1e999999999 would have as many digits.
    if "/" not in text and math.isinf(float(text)):
        raise OverflowError(text)
    weight = Fraction(text)
    float(weight)  # refuses a quotient that is too large
    return weight


@dataclass(frozen=True, kw_only=True)
class TokenSettings(SettingGroup):
    """How token data are stored and read; see `TokenFormat`.

    Attributes:
        vocabulary: size of the vocabulary of token data; all tokens are smaller.
        documents: whether attention and targets of token data stay within each document.
        token_column: name of the column of token blocks; data with this column and no images train a language model.
        block_tokens: tokens of a block, for blobs and for lists of variable size; None: that of the column.
        token_dtype: dtype of a token in blobs, such as "uint16".
        pad_token: token to write into padding; None: padding stays as it is stored.
        end_token: token that ends a document, for `documents` of data without the column `document_starts`.
        pack: "best-fit": each sample is a document, and blocks of `block_tokens` are packs of documents; attention,
            positions and targets stay within each document; see `Split.packed`.
        too_long: what to do with a document that is longer than a pack: "cut" or "refuse".
        loss_mask: column of lists with a Boolean or integer for each token: a token whose value is 0 is no target.
    """

    title: ClassVar[str] = "tokens"

    vocabulary: Annotated[int | None, Metavar("TOKENS"), Range(1)] = None
    documents: bool = False
    token_column: Annotated[str, Metavar("COLUMN")] = "tokens"  # noqa: S105 - tokens of a text
    block_tokens: Annotated[int | None, Metavar("TOKENS"), Range(1)] = None
    token_dtype: Annotated[str | None, Metavar("DTYPE")] = None
    pad_token: Annotated[int | None, Metavar("TOKEN"), Range(0)] = None
    end_token: Annotated[int | None, Metavar("TOKEN"), Range(0)] = None
    pack: Literal["best-fit"] | None = None
    too_long: Literal["cut", "refuse"] = "cut"
    loss_mask: Annotated[str | None, Metavar("COLUMN")] = None

    def check(self) -> None:
        """Check that what packs need is given, and nothing that only they use."""
        if self.pack is not None and self.block_tokens is None:
            raise ConfigError(f"pack is {self.pack!r}; give --block-tokens too, the tokens of a pack")
        if self.pack is None and self.too_long != "cut":
            raise ConfigError(f"too_long is {self.too_long!r}, and there are no packs; give --pack best-fit too")


@dataclass(frozen=True, kw_only=True)
class AudioSettings(SettingGroup):
    """Which clips of sounds a run trains on, as mel spectrograms; see `AudioLoader`.

    Attributes:
        clip_seconds: length of a clip; shorter sounds are followed by silence.
        sample_rate: samples per second, to which sounds are resampled; they are mixed to mono.
        mels: mel bands of a spectrogram, of windows of 25 ms every 10 ms.
        gain_db: largest random change of the loudness, up or down, in dB.
        time_masks: random masks over frames (SpecAugment), of at most 20 each.
        freq_masks: random masks over mel bands, of at most 8 each.
    """

    title: ClassVar[str] = "sounds"

    clip_seconds: Annotated[float, Metavar("SECONDS"), Range(0)] = 1.0
    sample_rate: Annotated[int, Metavar("HZ"), Range(1)] = 16_000
    mels: Annotated[int, Metavar("NUMBER"), Range(1)] = 64
    gain_db: Annotated[float, Metavar("DB"), Range(0)] = 0.0
    time_masks: Annotated[int, Metavar("NUMBER"), Range(0)] = 0
    freq_masks: Annotated[int, Metavar("NUMBER"), Range(0)] = 0


@dataclass(frozen=True, kw_only=True)
class OrderSettings(SettingGroup):
    """In which order a run reads the samples.

    Attributes:
        seed: seed of initialisation, order, augmentation and, together with the rank, dropout.
        shuffle: "global", which needs a cache for all of the data, or "windowed", which needs a small one.
        lanes: lanes of a windowed shuffle; see `OrderConfig`. With `lanes=1` and without `block`, the loader derives
            both from the sizes of the shards and of the cache.
        block: block of a windowed shuffle; see `OrderConfig`.
        sticky: whether each lane of a windowed shuffle has the same samples in every epoch, so that each node reads
            its own part of the data; needs `block`.
    """

    title: ClassVar[str] = "order of the samples"

    seed: Annotated[int, Metavar("NUMBER"), Range(0, 1 << 64)] = 0
    shuffle: Literal["global", "windowed"] = "global"
    lanes: Annotated[int, Metavar("NUMBER"), Range(1)] = 1
    block: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None
    sticky: bool = False

    def check(self) -> None:
        """Check that lanes, block and sticky fit the shuffle."""
        if self.shuffle != "windowed" and (self.lanes > 1 or self.block is not None):
            raise ConfigError(
                f"lanes is {self.lanes} and block is {self.block}, and shuffle is {self.shuffle!r}; they are for "
                "--shuffle windowed only"
            )
        if self.shuffle == "windowed" and self.block is None and self.lanes > 1:
            raise ConfigError(
                f"lanes is {self.lanes}, and block is not set; give --block too, the samples that are permuted "
                "together, or leave out --lanes: the loader then derives both"
            )
        if self.sticky and self.block is None:
            raise ConfigError(
                "sticky needs a windowed shuffle with numbers of its own; give --shuffle windowed, --lanes (a "
                "multiple of the number of nodes) and --block"
            )

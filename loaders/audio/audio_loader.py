"""`AudioLoader`: batches of clips of sounds in the access order; a resumed run serves each sample exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.ledger.masked import Masked
from datasvc.loaders.audio.audio_decoder import AudioBatch, AudioDecoder, ClipFormat, ClipPlan
from datasvc.loaders.audio.clips import AudioAugment
from datasvc.loaders.audio.mel import MelConfig
from datasvc.loaders.core.arguments import check_sizes
from datasvc.loaders.core.batches import BatchDecoder
from datasvc.loaders.core.mixture import Mixture, check_samples, divide_columns, holds_labels
from datasvc.loaders.core.state import changed_fields
from datasvc.loaders.decode.backend import OnBad, check_on_bad
from datasvc.loaders.decode.choice.choice import count_rank_processors
from datasvc.loaders.decode.media_loader import MediaLoader, check_media_column
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.order import OrderConfig, Shuffle, Tail
from datasvc.shards import Split
from datasvc.shards.format.schema import AUDIO, FRAMES, LABEL, RATE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Features = Literal["wave", "mel"]


class AudioLoader(MediaLoader[AudioBatch[Any]]):
    """Batches of clips of a split's sounds: `for features, labels in loader` runs to the end of the epoch.

    Order, state, ranks, cache and tail work as in `ImageLoader`. A clip is `seconds` of a file: at a random place in
    training, in the middle in an evaluation. A file that is shorter is followed by zeros, and `batch.length` has the
    part that it fills. Only the part of a file that its clip needs is decoded. Batches are on the CPU and equal to
    the last bit at any number of ranks and threads.

    Args:
        split: a split of a data-set version that has sounds, or a mixture of several splits.
        batch_size, training, cache, seed, shuffle, order, ranks, tail, prefetch, ledger, masked: see `Loader`.
        seconds: length of a clip, up to 600.
        rate: samples per second of a clip; files with other rates are resampled, see `resample`.
        features: "wave", or "mel" for mel spectrograms.
        channels: channels of a clip. 1: the mean of the file's channels. Otherwise files have as many channels, or
            one, which is repeated; other files are bad samples.
        mel: settings of mel spectrograms.
        augment: random changes in training: gain and masks.
        columns: further columns for `batch.columns`, as in `ImageLoader`; `text` is one of speech data.
        on_bad: treatment of samples that do not decode: "raise" an error, or "mask": zeros, False in the mask, and
            the sample's name in `batch.bad`.
        num_threads: decoding threads; None: the processors of this process, divided by the ranks of the node.

    Raises:
        ConfigError: an argument is out of range; the split has no sounds; a batch is larger than the epoch with
            `tail="drop"`.
        MissingPackageError: soundfile is not installed.
        CacheFullError: the cache's budget cannot hold the shards that the order needs at once.

    Attributes:
        num_bad: samples handed over so far that did not decode.
    """

    def __init__(
        self,
        split: Split | Mixture,
        *,
        batch_size: int,
        training: bool,
        seconds: float,
        rate: int = 16_000,
        features: Features = "wave",
        channels: int = 1,
        mel: MelConfig | None = None,
        augment: AudioAugment | None = None,
        columns: Sequence[str] = (),
        on_bad: OnBad = "raise",
        num_threads: int | None = None,
        cache: Cache | str | Path | None = None,
        seed: int | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        order: OrderConfig | None = None,
        ranks: DataRanks | DeviceMesh | None = None,
        tail: Tail | None = None,
        prefetch: int = 2,
        ledger: Path | str | None = None,
        masked: Masked | None = None,
    ) -> None:
        check_samples(split)
        check_sizes(rate=rate, channels=channels, num_threads=num_threads)
        augment = augment or AudioAugment()
        if features not in get_args(Features):
            raise ConfigError(f"features is {features!r}; expected one of {', '.join(get_args(Features))}")
        check_on_bad(on_bad)
        if features == "wave" and (mel is not None or augment.has_masks):
            raise ConfigError("mel= and the masks of augment= are for features='mel', and features is 'wave'")
        self._form = ClipFormat(seconds, rate, channels, (mel or MelConfig()) if features == "mel" else None)
        if not (0 < seconds <= 600 and self._form.num_samples):
            raise ConfigError(f"seconds is {seconds}; expected at most 600, and at least one sample")
        if self._form.mel is not None:
            self._form.mel.check_clip(rate, self._form.num_samples)
        check_media_column(split, AUDIO, RATE, "sounds")
        with explain_missing("AudioLoader"):
            import soundfile  # noqa: F401 - threads import it

        self._number_columns, self._list_columns = divide_columns(split, columns)
        labels = [LABEL] if holds_labels(split, columns) else []
        self._augment, self._on_bad = augment, on_bad
        self._num_processors = count_rank_processors()
        self._num_threads = num_threads or self._num_processors
        super().__init__(
            split,
            blob=AUDIO,
            columns=tuple(dict.fromkeys([FRAMES, RATE, *labels, *self._number_columns])),
            batch_size=batch_size,
            training=training,
            cache=cache,
            seed=seed,
            shuffle=shuffle,
            order=order,
            ranks=ranks,
            tail=tail,
            prefetch=prefetch,
            ledger=ledger,
            masked=masked,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """See `Loader.settings`."""
        form = self._form
        return {
            "kind": "audio",
            "seconds": form.seconds,
            "rate": form.rate,
            "channels": form.channels,
            "features": "wave" if form.mel is None else "mel",
            "mel": None if form.mel is None else changed_fields(form.mel),
            "augment": changed_fields(self._augment),
            "columns": [*self._number_columns, *self._list_columns],
        }

    @property
    def _batch_bytes(self) -> int:
        return self.batch_size * self._form.channels * self._form.num_samples * 4  # waves; spectrograms take less

    def _make_decoder(self) -> BatchDecoder[AudioBatch[Any]]:
        return AudioDecoder(
            self._form,
            ClipPlan(self.order.seed, self._augment if self.training else None),
            batch_size=self.batch_size,
            num_threads=self._num_threads,
            prefetch=self._prefetch,
            on_bad=self._on_bad,
            describe=self._batches.describe,
            numbers=self._number_columns,
            lists=self._list_columns,
            is_mixture=isinstance(self.split, Mixture),
            profiler=self.profiler,
        )

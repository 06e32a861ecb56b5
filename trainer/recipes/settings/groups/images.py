"""The groups of settings of images: how they are prepared, decoded and evaluated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import choose_metric_mode
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup

if TYPE_CHECKING:
    from datasvc.loaders.augment.augment import AugmentConfig, Transform


@dataclass(frozen=True, kw_only=True)
class ImageSettings(SettingGroup):
    """How images are cropped and scaled, and which random changes the training makes.

    Attributes:
        size: side of the images, in pixels.
        resize: pixels of the shorter side to which the evaluation scales an image before its centre crop; None:
            size * 256 / 224.
        evaluation: scaling and cropping of the images of the evaluation: "torchvision", as torchvision's `Resize` and
            `CenterCrop`, "window", which is faster and less exact, or "whole", the whole image as a square; versions
            without this setting used "window".
        scale: range of a random crop's area, as a share of the image's.
        ratio: range of a random crop's width / height.
        flip: probability of a horizontal flip.
        jitter: spreads of random changes of brightness, contrast, saturation and hue, such as "0.4,0.4,0.4,0.1"; see
            `AugmentConfig`. None: no changes.
        transform: function "module:function" that is called with each image after crop and flip, in training and
            evaluation: (`uint8[size, size, 3]`, random generator) -> image of the same shape; see `AugmentConfig`.
        mean: mean of each channel in 0..1, which is subtracted; that of ImageNet by default.
        std: standard deviation of each channel, by which the difference is divided.
    """

    title: ClassVar[str] = "images"

    size: Annotated[int, Metavar("PIXELS"), Range(1)] = 224
    resize: Annotated[int | None, Metavar("PIXELS")] = None
    # A test compares the choices with `augment.Evaluation`, whose module takes long to import.
    evaluation: Literal["torchvision", "window", "whole"] = "torchvision"
    scale: Annotated[tuple[float, float], Metavar("MIN MAX")] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], Metavar("MIN MAX")] = (3 / 4, 4 / 3)
    flip: Annotated[float, Metavar("PROBABILITY")] = 0.5
    jitter: Annotated[str | None, Metavar("BRIGHTNESS,CONTRAST,SATURATION,HUE")] = None
    transform: Annotated[str | None, Metavar("MODULE:FUNCTION")] = None
    mean: Annotated[tuple[float, float, float], Metavar("RED GREEN BLUE")] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[float, float, float], Metavar("RED GREEN BLUE")] = (0.229, 0.224, 0.225)

    def check(self) -> None:
        """Check that the centre crop fits, and the form of the transform; `build_augment` checks the rest."""
        if self.resize is not None and self.resize < self.size:
            raise ConfigError(
                f"resize is {self.resize}, below size {self.size}, so the centre crop does not fit; give a larger "
                "--resize or a smaller --size"
            )
        if self.transform is not None and not all(self.transform.partition(":")):
            raise ConfigError(
                f"transform is {self.transform!r}; expected 'module:function', such as 'my_package.images:blur'"
            )

    def build_augment(self, transform: Transform | None = None) -> AugmentConfig:
        """Return the configuration of the loader; `transform` is the function that the setting names.

        Raises:
            ConfigError: a setting has another form, or is out of range.
        """
        # Imported here, because it takes longer than all other checks.
        from datasvc.loaders.augment.augment import AugmentConfig

        try:
            brightness, contrast, saturation, hue = map(float, (self.jitter or "0,0,0,0").split(","))
        except ValueError as error:
            raise ConfigError(
                f"jitter is {self.jitter!r}; expected four numbers with commas, for brightness, contrast, saturation "
                "and hue, such as 0.4,0.4,0.4,0.1"
            ) from error
        return AugmentConfig(
            scale=self.scale,
            ratio=self.ratio,
            flip=self.flip,
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            hue=hue,
            resize=self.resize,
            evaluation=self.evaluation,
            transform=transform,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(SettingGroup):
    """How the loader decodes batches, and what it records.

    Attributes:
        prefetch: batches that the loader prepares ahead; 0: none.
        decode: what decodes images; "auto" is the fastest one that works; see `DecodeConfig`.
        decode_threads: decoding threads of a rank; None: the processors of the node divided by its ranks.
        decode_servers: URLs of nodes that decode a part of the images, `datasvc serve --decode-threads`, beside the
            threads of each rank; the token is that of DATASVC_TOKEN.
        on_bad: what happens to images that do not decode: "raise" ends the run, "mask" leaves them out of loss and
            metrics.
        decode_scale: "auto" decodes large JPEGs of a training on the CPU at a reduced scale where that takes less
            time; "full" never.
        decode_group: name of a group of jobs of this node that decode each training batch once for all of them; None:
            no group.
        decode_lag: batches that a job of the group may be behind another one and still get its batches.
        tune_loader: whether each rank raises its `decode_threads` and `prefetch` at the ends of epochs while it waits
            for decoding; batches stay the same.
        ledger: folder that records which samples each rank served, for `datasvc audit`; the same for all ranks and
            restarts. None: no record.
    """

    title: ClassVar[str] = "decoding and loading"

    prefetch: Annotated[int, Metavar("BATCHES"), Range(0)] = 2
    # A test compares the choices with those of `DecodeConfig`, whose module takes long to import.
    decode: Literal["auto", "cpu", "gpu", "gpu-window", "gpu-whole", "pillow"] = "auto"
    decode_threads: Annotated[int | None, Metavar("THREADS"), Range(1)] = None
    decode_servers: Annotated[tuple[str, ...], Metavar("URL")] = ()
    on_bad: Literal["raise", "mask"] = "raise"
    decode_scale: Literal["auto", "full"] = "auto"
    decode_group: Annotated[str | None, Metavar("NAME")] = None
    decode_lag: Annotated[int, Metavar("BATCHES"), Range(1)] = 6
    tune_loader: bool = False
    ledger: Annotated[str | None, Metavar("FOLDER")] = None

    def check(self) -> None:
        """Check that the settings of a group have one, and go together with it."""
        if self.decode_group is None and self.decode_lag != DecodeSettings.decode_lag:
            raise ConfigError(
                f"decode_lag is {self.decode_lag}, and there is no decode group; give --decode-group, or leave it at "
                f"{DecodeSettings.decode_lag}"
            )
        if self.decode_group is not None and self.tune_loader:
            raise ConfigError(
                "tune_loader raises threads and prefetch of one job, and the jobs of a decode group decode in turn; "
                "leave out --tune-loader or --decode-group"
            )
        if self.decode_group is not None and self.prefetch > self.decode_lag:
            raise ConfigError(
                f"prefetch is {self.prefetch}, and decode_lag is {self.decode_lag}: jobs of a decode group "
                "that prefetch more batches than it keeps would fall behind; raise --decode-lag, or lower --prefetch"
            )

    def without_records(self) -> Self:
        """Return the settings for a loader that writes no ledger, and decodes for itself what it reads."""
        return dataclasses.replace(self, ledger=None, decode_group=None, decode_lag=DecodeSettings.decode_lag)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(SettingGroup):
    """When and how a run evaluates, and whether evaluations end it.

    Attributes:
        evaluate_every: epochs between evaluations; each evaluation is followed by a checkpoint. None: evaluate at the
            end of the run only.
        statistics: statistics of batch normalisation: "average": moving averages of the training, averaged over the
            ranks; "recompute": means over batches of training data, with the weights that are evaluated.
        statistics_batches: steps of training data over which the means of "recompute" are computed.
        patience: number of consecutive evaluations without a new best `stop_metric` after which the run ends; None:
            never.
        stop_metric: metric of the evaluation that `patience` compares.
        stop_mode: "max" if a higher `stop_metric` is better, "min" if a lower one is; None: chosen by its name.
    """

    title: ClassVar[str] = "evaluation and early stopping"

    evaluate_every: Annotated[int | None, Metavar("EPOCHS"), Range(1)] = None
    statistics: Literal["average", "recompute"] = "average"
    statistics_batches: Annotated[int, Metavar("STEPS"), Range(1)] = 10
    patience: Annotated[int | None, Metavar("EVALUATIONS"), Range(1)] = None
    stop_metric: Annotated[str, Metavar("METRIC")] = "val_loss"
    stop_mode: Literal["max", "min"] | None = None

    @property
    def recomputes_statistics(self) -> bool:
        """Whether the statistics of batch normalisation are recomputed before each evaluation."""
        return self.statistics == "recompute"

    def check(self) -> None:
        """Check that settings have an effect, and that it is known which of two values of the metric is better."""
        if not self.recomputes_statistics and self.statistics_batches != EvaluationSettings.statistics_batches:
            raise ConfigError(
                f"statistics_batches is {self.statistics_batches}, and statistics is {self.statistics!r}, which uses "
                "no batches; give --statistics recompute, or leave it at "
                f"{EvaluationSettings.statistics_batches}"
            )
        if self.patience is None:
            return
        if self.evaluate_every is None:
            raise ConfigError("patience counts evaluations: set their period with --evaluate-every")
        # Called only for its error, which otherwise the first evaluation would raise.
        choose_metric_mode(self.stop_metric, self.stop_mode, option="--stop-mode")

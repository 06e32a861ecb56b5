"""The settings of a training run. They are checked when they are created, and stored in every checkpoint.

The check does not import torch, which takes seconds, so a mistake on the command line is reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.models.saving.save_policy import parse_duration, parse_policy
from datasvc.repository.logs.metric_mode import choose_metric_mode
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.trainer.recipes.optimizers.parameter_groups import DECAYED
from datasvc.trainer.recipes.optimizers.precision import PRECISIONS
from datasvc.trainer.recipes.optimizers.schedules import RATE_SCALINGS, SHAPES, RateSchedule
from datasvc.trainer.recipes.reporting.metric_logs import check_log

_AT_LEAST_ONE: Final = (
    "epochs",
    "batch_size",
    "global_batch",
    "micro_batch",
    "max_steps",
    "vocabulary",
    "reference_batch",
    "size",
    "lanes",
    "block",
    "evaluate_every",
    "patience",
    "checkpoint_every",
    "report_every",
)
_NOT_NEGATIVE: Final = (
    "learning_rate",
    "momentum",
    "weight_decay",
    "warmup_epochs",
    "warmup_start",
    "trust_coefficient",
    "rmsprop_rate",
    "power",
    "label_smoothing",
    "clip_norm",
    "prefetch",
)
_CHOICES: Final = {
    "rate_scaling": RATE_SCALINGS,
    "schedule": SHAPES,
    "optimizer": ("sgd", "lars", "lamb", "adamw", "rmsprop-sgd"),
    "decayed": DECAYED,
    "precision": PRECISIONS,
    "compression": ("none", "fp16", "bf16"),
    "shuffle": ("global", "windowed"),
    "device": ("cpu", "cuda"),
    # A test compares these three with `Evaluation`, `OVERLAPS` and `CODECS`, whose modules import torch.
    "evaluation": ("torchvision", "window"),
    "checkpoint_overlap": ("queue", "refuse"),
    "codec": ("none", "planes", "delta"),
}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        data: data-set reference, such as "digits@1"; resolved once, at the start of the run.
        repo: repository URL.
        name: model name of the checkpoints.
        model: one of `models.MODELS`, or "module:function"; None: "small-cnn" for images, "gpt" for tokens.
        model_option: options of the model, each "name=value" with a JSON value: "dropout=0.1".
        vocabulary: size of the vocabulary of token data; all tokens are smaller.
        documents: whether attention and targets of token data stay within each document.
        cache: folder of the node's cache; None or empty: the repository is read directly.
        cache_budget: budget of the node's cache, such as "50GB"; None keeps its present budget.
        peers: nodes to read from before the repository, written as for `datasvc stage --peers`; "ranks": the nodes of
            this job, each with a server that the job starts; None: no peers.
        epochs: passes over the training split; the schedule ends with the last one.
        max_steps: maximum number of optimizer steps: the run may end before `epochs` are over. The schedule does not
            change. None: no maximum.
        batch_size: samples of one rank per step.
        global_batch: samples of all ranks per step, instead of `batch_size`; the training is then the same at any
            number of ranks that divides it.
        micro_batch: samples of one backward pass; gradients are accumulated over the passes of a step.
            None: one pass.
        optimizer: "sgd", "lars", "lamb", "adamw" or "rmsprop-sgd".
        learning_rate: peak rate, for the reference batch if `rate_scaling` scales it, else for the global batch.
        rate_scaling: how the rate grows with the global batch: "linear", "sqrt" or "none".
        reference_batch: global batch for which `learning_rate` is given, if it is scaled.
        momentum: momentum of SGD, LARS and RMSprop-SGD.
        nesterov: whether SGD and LARS use Nesterov momentum.
        betas: decay rates of the two moments of AdamW and LAMB.
        weight_decay: factor of the weight decay; decoupled in LAMB and AdamW, L2 in the other optimizers.
        decayed: "weights" exempts biases and normalisations from weight decay, and from the layer-wise rates of
            LARS and LAMB; "all" exempts none.
        trust_coefficient: trust coefficient of LARS.
        rmsprop_rate: rate of the RMSprop phase of RMSprop-SGD.
        schedule: decay of the rate after the warm-up: "cosine", "step", "polynomial" or "constant".
        milestones: for the schedule "step": each "epoch:factor"; from that epoch on the rate is peak * factor.
        power: exponent of the schedule "polynomial".
        warmup_epochs: epochs of linear warm-up, fractions allowed.
        warmup_start: rate at the start of the warm-up; it is not scaled.
        label_smoothing: share of each target that is spread over all classes.
        clip_norm: maximum norm of the whole gradient; None: not clipped.
        ema_decay: decay of the moving average of the weights, which is evaluated too; None: no average.
        precision: "fp32"; "bf16" or "fp16": mixed precision, fp16 with a loss scale.
        compression: format of gradients in all-reduces: "none", "fp16" or "bf16".
        channels_last: whether images and activations are in channels-last memory format.
        compile: backend of torch.compile, such as "inductor"; None: not compiled.
        size: side of the images, in pixels.
        resize: pixels of the shorter side to which the evaluation scales an image before its centre crop; None:
            size * 256 / 224.
        evaluation: scaling and cropping of the images of the evaluation: "torchvision", as torchvision's `Resize` and
            `CenterCrop`, or "window", which is faster and less exact; versions without this setting used "window".
        scale: range of a random crop's area, as a share of the image's.
        ratio: range of a random crop's width / height.
        flip: probability of a horizontal flip.
        seed: seed of initialisation, order, augmentation and, together with the rank, dropout.
        shuffle: "global", which needs a cache for all of the data, or "windowed", which needs a small one.
        lanes: lanes of a windowed shuffle; see `OrderConfig`. With `lanes=1` and without `block`, the loader derives
            both from the sizes of the shards and of the cache.
        block: block of a windowed shuffle; see `OrderConfig`.
        prefetch: batches that the loader prepares ahead; 0: none.
        evaluate_every: epochs between evaluations; each evaluation is followed by a checkpoint. None: evaluate at the
            end of the run only.
        patience: number of consecutive evaluations without a new best `stop_metric` after which the run ends; None:
            never.
        stop_metric: metric of the evaluation that `patience` compares.
        stop_mode: "max" if a higher `stop_metric` is better, "min" if a lower one is; None: chosen by its name.
        checkpoint_every: steps between checkpoints; the end of the run always commits one.
        max_stall: maximum share of the training time that checkpoints take, such as "3%"; to stay below it,
            checkpoints are made less often. None: no limit.
        checkpoint_overlap: what happens to a checkpoint while earlier ones are being written: "queue" makes it wait
            once two are, "refuse" skips it.
        codec: storage of weights: "none": raw; "planes": compressed; "delta": the difference to the previous
            checkpoint, where that is smaller.
        grace: maximum time from SIGTERM or Ctrl-C to the end of the run, which saves a last checkpoint.
        resume: "auto" continues the newest version of `name` if there is one; "never" starts a new run; a model
            version such as "digits-cnn@3" continues that version.
        init_from: model version whose weights a new run starts with, such as "digits-cnn@3", for fine-tuning on other
            data; a run that continues a checkpoint ignores it. None: random weights.
        init_exclude: tensors that keep their random weights with `init_from`, such as "head": names, prefixes of
            whole segments, or patterns with `*`.
        device: "cpu", or "cuda" for the GPU of this rank.
        log_to: experiment trackers: "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:EXPERIMENT".
        report_every: steps between reports; each report waits for the device.
        profile: file for a trace of the loader's steps, written at the end of each epoch together with a printed
            report; with several ranks each has its own file, such as `trace.0.json`. None: no trace.

    Raises:
        ConfigError: a value is out of range.
    """

    data: str
    repo: str
    name: str
    model: str | None = None
    model_option: tuple[str, ...] = ()
    vocabulary: int | None = None
    documents: bool = False
    cache: str | None = None
    cache_budget: str | None = None
    peers: str | None = None
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    global_batch: int | None = None
    micro_batch: int | None = None
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    rate_scaling: str = "none"
    reference_batch: int = 256
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    decayed: str = "weights"
    trust_coefficient: float = 0.001
    rmsprop_rate: float = 3e-4
    schedule: str = "cosine"
    milestones: tuple[str, ...] = ()
    power: float = 2.0
    warmup_epochs: float = 1.0
    warmup_start: float = 0.0
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None
    precision: str = "fp32"
    compression: str = "none"
    channels_last: bool = False
    compile: str | None = None
    size: int = 224
    resize: int | None = None
    evaluation: str = "torchvision"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    seed: int = 0
    shuffle: str = "global"
    lanes: int = 1
    block: int | None = None
    prefetch: int = 2
    evaluate_every: int | None = None
    patience: int | None = None
    stop_metric: str = "val_loss"
    stop_mode: str | None = None
    checkpoint_every: int = 1000
    max_stall: str | None = None
    checkpoint_overlap: str = "queue"
    codec: str = "delta"
    grace: str = "30s"
    resume: str = "auto"
    init_from: str | None = None
    init_exclude: tuple[str, ...] = ()
    device: str = "cpu"
    log_to: tuple[str, ...] = ()
    report_every: int = 1
    profile: str | None = None

    def __post_init__(self) -> None:
        # Check here all that needs no data: an error on one rank must come before the ranks wait for each other.
        check_name(self.name, "model")
        self._check_ranges()
        self._check_together()
        parse_policy(self.checkpoint_every, self.max_stall)
        parse_duration(self.grace)
        # Created only for its errors about the milestones.
        RateSchedule(
            peak=self.learning_rate, epochs=self.epochs, shape=self.schedule, milestones=self.parse_milestones()
        )
        self.parse_model_options()
        for target in self.log_to:
            check_log(target)
        # `AugmentConfig` checks its own ranges. It comes last, because its import takes longer than all other checks.
        from datasvc.loaders.augment.augment import AugmentConfig

        AugmentConfig(scale=self.scale, ratio=self.ratio, flip=self.flip)

    def parse_milestones(self) -> tuple[tuple[float, float], ...]:
        """Return `(epoch, factor)` of each milestone. Raises ConfigError: a milestone has another form."""
        pairs = [milestone.partition(":") for milestone in self.milestones]
        message = (
            f"milestones are {self.milestones}; expected each as 'epoch:factor', such as '30:0.1', with two numbers "
            "of 0 or more"
        )
        try:
            milestones = tuple((float(epoch), float(factor)) for epoch, _, factor in pairs)
        except ValueError as error:
            raise ConfigError(message) from error
        if not all(0 <= number < math.inf for milestone in milestones for number in milestone):
            raise ConfigError(message)
        return milestones

    def parse_model_options(self) -> dict[str, Any]:
        """Return the options of the model by name.

        Raises:
            ConfigError: an option has another form, or its value is not JSON.
        """
        options = {}
        for option in self.model_option:
            name, _, value = option.partition("=")
            try:
                options[name] = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"model_option is {option!r}; expected 'name=value' with a JSON value") from error
        return options

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dataclasses.asdict(self)

    def _check_ranges(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            # Written with `not`, so that NaN is refused too.
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; expected a finite number, not below 0")
        for name, value in (("label_smoothing", self.label_smoothing), ("ema_decay", self.ema_decay or 0.0)):
            if not 0 <= value < 1:
                raise ConfigError(f"{name} is {value}; expected 0 <= {name} < 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}; expected 0 <= beta < 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        if self.stop_mode not in (None, "max", "min"):
            raise ConfigError(f"stop_mode is {self.stop_mode!r}; expected 'max' or 'min'")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed is {self.seed}; expected 0 <= seed < 2**64")
        with _naming("data", self.data):
            parse_reference(self.data)

    def _check_together(self) -> None:
        if self.peers is not None and not self.cache:
            raise ConfigError("peers need a node cache: set its folder with --cache")
        if self.cache_budget is not None:
            if not self.cache:
                raise ConfigError("cache_budget is the budget of a node cache: set its folder with --cache")
            # Imported here, because most runs have no budget, and need the cache only after this check.
            from datasvc.cache import parse_budget

            with _naming("cache_budget", self.cache_budget):
                parse_budget(self.cache_budget, Path("/"))  # any folder: only the form of the budget is checked
        if self.resize is not None and self.resize < self.size:
            raise ConfigError(
                f"resize is {self.resize}, below size {self.size}, so the centre crop does not fit; give a larger "
                "--resize or a smaller --size"
            )
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
        # Check the folder now: the trace is written at the end of an epoch, which may be hours away.
        if self.profile is not None and not Path(self.profile).absolute().parent.is_dir():
            raise ConfigError(f"profile is {self.profile!r}, and its folder does not exist; create the folder first")
        if self.resume not in ("auto", "never") and "@" not in self.resume:
            raise ConfigError(
                f"resume is {self.resume!r}; expected 'auto', 'never' or a version such as 'digits-cnn@3'"
            )
        with _naming("resume", self.resume):
            parse_reference(self.resume, "model")
        if self.init_from is not None:
            with _naming("init_from", self.init_from):
                parse_reference(self.init_from, "model")
            if self.resume not in ("auto", "never"):
                raise ConfigError(
                    f"resume is {self.resume!r} and init_from is {self.init_from!r}; give one of them: a run that "
                    "continues a version has its weights"
                )
        elif self.init_exclude:
            raise ConfigError("init_exclude names tensors of the version of --init-from; give that too")
        if self.nesterov and not (self.momentum and self.optimizer in ("sgd", "lars")):
            raise ConfigError(
                "nesterov works with the optimizers 'sgd' and 'lars' only, and needs a momentum above 0"
            )
        if self.patience is not None and self.evaluate_every is None:
            raise ConfigError("patience counts evaluations: set their period with --evaluate-every")
        if self.patience is not None:
            # Called only for its error, which otherwise the first evaluation would raise.
            choose_metric_mode(self.stop_metric, self.stop_mode, option="--stop-mode")


@contextlib.contextmanager
def _naming(name: str, value: str) -> Iterator[None]:
    """Add the name and value of a setting to a ConfigError of the block, whose message has only a part of them."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from error

"""The groups of settings of the training: length, model, optimizer, learning rate, gradients and precision."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from datasvc.errors import ConfigError
from datasvc.sizes import parse_size
from datasvc.trainer.optim.sync_policy import SyncPolicy, parse_sync
from datasvc.trainer.recipes.optimizers.parameter_groups import Decayed
from datasvc.trainer.recipes.optimizers.precision import Precision
from datasvc.trainer.recipes.optimizers.schedules import RateScaling, Shape
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup, naming
from datasvc.trainer.servers.leases import Staleness, parse_staleness

IMAGE_MODEL: Final = "small-cnn"
"""The default model of image data."""

AUDIO_MODEL: Final = "keyword-cnn"
"""The default model of sounds."""

TEXT_MODEL: Final = "gpt"
"""The default model of token data."""


_COMPRESSIONS: Final = "{none,fp16,bf16,topk:SHARE[:STEPS],dgc:SHARE[:STEPS],powersgd:RANK[:STEPS],quantized:CODEC}"
_SYNCS: Final = (
    "{bsp,local:STEPS,postlocal:STEPS:STEPS,hierarchical:STEPS,STEPS,easgd:STEPS:BETA,"
    "diloco:STEPS[:OPTIONS],gossip:GRAPH[:STEPS[:OPTIONS]],tournament:STEPS[:OPTIONS],ssp:STEPS,async}"
)
_PLAIN: Final = ("none", "fp16", "bf16")  # the compressions without a number, which keep nothing between steps


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(SettingGroup):
    """How gradients change the weights; for the learning rate see `RateSettings`.

    Attributes:
        optimizer: "sgd", "lars", "lamb", "adamw" or "rmsprop-sgd".
        momentum: momentum of SGD, LARS and RMSprop-SGD.
        nesterov: whether SGD and LARS use Nesterov momentum.
        betas: decay rates of the two moments of AdamW and LAMB.
        weight_decay: factor of the weight decay; decoupled in LAMB and AdamW, L2 in the other optimizers.
        decayed: "weights" exempts biases and normalisations from weight decay, and from the layer-wise rates of
            LARS and LAMB; "all" exempts none.
        trust_coefficient: trust coefficient of LARS.
        rmsprop_rate: rate of the RMSprop phase of RMSprop-SGD.
        clip_norm: maximum norm of the whole gradient; None: not clipped.
    """

    title: ClassVar[str] = "optimizer"

    optimizer: Literal["sgd", "lars", "lamb", "adamw", "rmsprop-sgd"] = "sgd"
    momentum: Annotated[float, Metavar("FACTOR"), Range(0)] = 0.9
    nesterov: bool = False
    betas: Annotated[tuple[float, float], Metavar("BETA1 BETA2"), Range(0, 1)] = (0.9, 0.999)
    weight_decay: Annotated[float, Metavar("FACTOR"), Range(0)] = 1e-4
    decayed: Decayed = "weights"
    trust_coefficient: Annotated[float, Metavar("FACTOR"), Range(0)] = 0.001
    rmsprop_rate: Annotated[float, Metavar("RATE"), Range(0)] = 3e-4
    clip_norm: Annotated[float | None, Metavar("NORM"), Range(0)] = None

    def check(self) -> None:
        """Check that the optimizer has Nesterov momentum, if that is asked for."""
        if self.nesterov and not (self.momentum and self.optimizer in ("sgd", "lars")):
            raise ConfigError(
                "nesterov works with the optimizers 'sgd' and 'lars' only, and needs a momentum above 0"
            )


@dataclass(frozen=True, kw_only=True)
class RateSettings(SettingGroup):
    """The learning rate of each step.

    Attributes:
        learning_rate: peak rate, for the reference batch if `rate_scaling` scales it, else for the global batch.
        rate_scaling: how the rate grows with the global batch: "linear", "sqrt" or "none".
        reference_batch: global batch for which `learning_rate` is given, if it is scaled.
        schedule: decay of the rate after the warm-up: "cosine", "step", "polynomial" or "constant".
        milestones: for the schedule "step": each "epoch:factor"; from that epoch on the rate is peak * factor.
        power: exponent of the schedule "polynomial".
        warmup_epochs: epochs of linear warm-up, fractions allowed.
        warmup_start: rate at the start of the warm-up; it is not scaled.
    """

    title: ClassVar[str] = "learning rate"

    learning_rate: Annotated[float, Metavar("RATE"), Range(0)] = 0.1
    rate_scaling: RateScaling = "none"
    reference_batch: Annotated[int, Metavar("SAMPLES"), Range(1)] = 256
    schedule: Shape = "cosine"
    milestones: Annotated[tuple[str, ...], Metavar("EPOCH:FACTOR")] = ()
    power: Annotated[float, Metavar("EXPONENT"), Range(0)] = 2.0
    warmup_epochs: Annotated[float, Metavar("EPOCHS"), Range(0)] = 1.0
    warmup_start: Annotated[float, Metavar("RATE"), Range(0)] = 0.0

    def check(self) -> None:
        """Check the form of the milestones."""
        self.parse_milestones()

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


@dataclass(frozen=True, kw_only=True)
class ModelSettings(SettingGroup):
    """What a run trains.

    Attributes:
        model: small-cnn, resnet18, resnet34, resnet50, resnet101, resnet152, alexnet, googlenet, inception-v3, vgg16,
            gpt, gpt2, gpt2-medium or keyword-cnn; or "MODULE:FUNCTION", your own. None: small-cnn for images, gpt for
            tokens, keyword-cnn for sounds.
        model_option: options of the model, each "name=value" with a JSON value: "dropout=0.1".
        sync_batch_norm: whether batch normalisation uses the samples of all ranks in a backward pass, so that the
            training is the same at any number of ranks.
        label_smoothing: share of each target that is spread over all classes.
        ema_decay: decay of the moving average of the weights, which is evaluated too; None: no average.
    """

    title: ClassVar[str] = "model and loss"

    model: Annotated[str | None, Metavar("NAME")] = None
    model_option: Annotated[tuple[str, ...], Metavar("NAME=VALUE")] = ()
    sync_batch_norm: bool = False
    label_smoothing: Annotated[float, Metavar("SHARE"), Range(0, 1)] = 0.0
    ema_decay: Annotated[float | None, Metavar("FACTOR"), Range(0, 1)] = None

    def check(self) -> None:
        """Check the form of the model's options."""
        self.parse_model_options()

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


@dataclass(frozen=True, kw_only=True)
class LengthSettings(SettingGroup):
    """How many samples a step and a run have.

    Attributes:
        epochs: passes over the training split; the schedule ends with the last one.
        max_steps: maximum number of optimizer steps: the run may end before `epochs` are over. The schedule does not
            change. None: no maximum.
        stop_on_nan: end the run with an error, and save nothing more, when its loss or weights are NaN or infinite.
        batch_size: samples of one rank per step.
        global_batch: samples of all ranks per step, instead of `batch_size`; the training is then the same at any
            number of ranks that divides it.
        micro_batch: samples of one backward pass; gradients are accumulated over the passes of a step.
            None: one pass.
    """

    title: ClassVar[str] = "batches and length of the run"

    epochs: Annotated[int, Metavar("EPOCHS"), Range(1)] = 10
    max_steps: Annotated[int | None, Metavar("STEPS"), Range(1)] = None
    stop_on_nan: bool = False
    batch_size: Annotated[int, Metavar("SAMPLES"), Range(1)] = 32
    global_batch: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None
    micro_batch: Annotated[int | None, Metavar("SAMPLES"), Range(1)] = None


@dataclass(frozen=True)
class CompressionChoice:
    """A compression of gradients.

    Attributes:
        name: name in `datasvc.trainer.Compression`.
        arguments: its arguments, by name; empty for those without a number.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_memory(self) -> bool:
        """Whether ranks keep the unsent part of gradients for later steps."""
        return self.name not in _PLAIN


def parse_compression(text: str) -> CompressionChoice:
    """Return the compression that a text describes.

    Args:
        text: "none", "fp16", "bf16"; "topk:SHARE" or "dgc:SHARE" with 0 < SHARE <= 1, and ":STEPS" for a warm-up;
            "powersgd:RANK" or "powersgd:RANK:STEPS", with STEPS steps without compression at the start;
            "quantized:CODEC", and "quantized:qsgd:LEVELS".

    Raises:
        ConfigError: the text has another form, or a number is out of range.
    """
    name, *numbers = text.split(":")
    try:
        match name, numbers:
            case (("none" | "fp16" | "bf16"), []):
                return CompressionChoice(name)
            case (("topk" | "dgc"), [ratio, *steps]) if len(steps) < 2 and 0 < float(ratio) <= 1:
                warmup = {"warmup_steps": int(steps[0])} if steps and int(steps[0]) >= 0 else {}
                if len(warmup) == len(steps):
                    return CompressionChoice(name, {"ratio": float(ratio), **warmup})
            case "quantized", [("int8" | "int4" | "ternary" | "onebit" | "signsgd") as codec]:
                return CompressionChoice(name, {"codec": codec})
            case "quantized", ["qsgd", *levels] if len(levels) < 2 and all(1 <= int(n) <= 127 for n in levels):
                return CompressionChoice(name, {"codec": "qsgd", "levels": int(levels[0]) if levels else 7})
            case "powersgd", [rank, *steps] if len(steps) < 2 and int(rank) >= 1 and all(int(n) >= 0 for n in steps):
                # Without compression in the first thousand steps, as by default in the library, short runs would
                # never compress.
                return CompressionChoice(name, {"rank": int(rank), "start_iteration": int(steps[0]) if steps else 0})
    except ValueError:
        pass  # a text that is not a number gets the same message
    raise ConfigError(
        f"compression is {text!r}; expected none, fp16, bf16, topk:SHARE or dgc:SHARE with 0 < SHARE <= 1, such as "
        "topk:0.01, and :STEPS for a warm-up, powersgd:RANK, such as powersgd:2, or powersgd:RANK:STEPS, with STEPS "
        "steps without compression first, or quantized:CODEC with int8, int4, ternary, onebit, signsgd, or "
        "qsgd:LEVELS with 1 to 127 levels"
    )


@dataclass(frozen=True, kw_only=True)
class GradientSettings(SettingGroup):
    """How the ranks combine their gradients.

    Attributes:
        compression: what the ranks send of a gradient: "none": all of it; "fp16", "bf16": 16 bits of each number;
            "topk:0.01": this share of its numbers, the largest; "topk:0.01:500": the same after 500 steps with larger
            shares; "dgc:0.001": this share of the momentum of each rank; "powersgd:2": two matrices of this rank;
            "powersgd:2:1000": the same after 1000 steps without compression; "quantized:int4": integers of 8 to 1
            bits. ternary, qsgd and signsgd lose what they do not send; the others after bf16 send it later.
        op: "average": the step is made with the mean gradient of all ranks; "adasum": each rank makes a step with
            the mean gradient of its own samples, and the ranks combine these steps; needs a power of two ranks,
            without `elastic`.
        sync: when the ranks wait for each other: "bsp": in every step, to combine their gradients; otherwise each
            rank makes steps of its own, and in rounds the ranks average their weights: "local:8": every 8 steps;
            "postlocal:100:8": in each of the first 100 steps, then every 8; "hierarchical:2,8": every 2 steps those
            of a node, every 8 all; "easgd:8:0.9": elastic averaging; "diloco:32": with an outer optimizer;
            "gossip:ring", "gossip:exponential": with neighbours, "gossip:ring:4:fragments=4" of a part of the weights
            in turns; "tournament:8": every 8 steps the loser of each pair of ranks takes over the winner,
            "tournament:8:samples=256,perturb=1.2" with learning rates that differ. With parameter servers
            (`datasvc-run --servers`): "ssp:3": a worker waits if it is more than 3 steps ahead of the slowest;
            "async": never. See docs/explanation/waiting.md.
        leases: with `sync` local, postlocal or diloco, each replica reads one run of the samples of a round, and
            makes as many steps as this has batches: "equal": equally many; "measured": in proportion to its speed in
            the rounds before; None: each step has its part of a global batch.
        bucket: maximum size of the buckets in which gradients are sent, such as "4MiB"; "auto": chosen
            from measurements in the first steps; None: 25MiB.
    """

    title: ClassVar[str] = "gradients of the ranks"

    compression: Annotated[str, Metavar(_COMPRESSIONS)] = "none"
    op: Literal["average", "adasum"] = "average"
    sync: Annotated[str, Metavar(_SYNCS)] = "bsp"
    leases: Literal["equal", "measured"] | None = None
    bucket: Annotated[str | None, Metavar("{auto,SIZE}")] = None

    def check(self) -> None:
        """Check the forms of compression, sync and bucket, and that these go with what the ranks combine."""
        if self.uses_servers:
            self.parse_staleness()
        else:
            self.parse_sync()
        if self.leases is not None and not self.averages_weights:
            raise ConfigError(
                f"leases is {self.leases!r}, and with sync {self.sync!r} there are no rounds to divide; give --sync "
                "local:8, or leave out --leases"
            )
        choice = self.parse_compression()
        if self.combines_steps and choice.has_memory:
            raise ConfigError(
                f"compression is {self.compression!r} and op is 'adasum', which combines steps of the ranks and not "
                "gradients, so no part can be sent later; give --compression none, fp16 or bf16, or --op average"
            )
        bucket = self.parse_bucket()
        if self.combines_steps and bucket is not None:
            raise ConfigError("op is 'adasum', which sends no buckets; leave out --bucket, or give --op average")
        if bucket == "auto" and choice.has_memory:
            raise ConfigError(
                f"compression is {self.compression!r}, whose bytes are not proportional to the size of a bucket, and "
                "bucket is 'auto'; give --bucket a size, or --compression none, fp16 or bf16"
            )

    @property
    def combines_steps(self) -> bool:
        """Whether each rank makes a step with its own gradient, and the ranks combine the steps."""
        return self.op == "adasum"

    @property
    def averages_weights(self) -> bool:
        """Whether each rank makes steps with its own gradients, and the ranks average their weights in rounds."""
        return self.sync != "bsp" and not self.uses_servers

    @property
    def uses_servers(self) -> bool:
        """Whether workers push gradients to parameter servers."""
        return self.sync.partition(":")[0] in ("ssp", "async")

    @property
    def makes_own_steps(self) -> bool:
        """Whether each rank makes steps with its own gradients, whatever the ranks combine then."""
        return self.combines_steps or self.averages_weights

    @property
    def moves_momentum(self) -> bool:
        """Whether the compression of gradients applies the momentum, and not the optimizer."""
        return self.compression.startswith("dgc")

    def parse_compression(self) -> CompressionChoice:
        """Return the compression. Raises ConfigError: it has another form."""
        return parse_compression(self.compression)

    def parse_sync(self) -> SyncPolicy | None:
        """Return how the ranks average their weights; None: they do not. Raises ConfigError: it has another form."""
        if not self.averages_weights:
            return None
        try:
            return parse_sync(self.sync)
        except ValueError as error:
            raise ConfigError(
                f"{error}; or bsp, with which the ranks combine gradients in every step; or ssp:STEPS or async, with "
                "parameter servers"
            ) from error

    def parse_staleness(self) -> Staleness:
        """Return how far workers of parameter servers may be apart. Raises ConfigError: it has another form."""
        try:
            return parse_staleness(self.sync)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def parse_bucket(self) -> int | Literal["auto"] | None:
        """Return the maximum size of buckets in bytes, "auto", or None for the optimizer's default."""
        if self.bucket is None or self.bucket == "auto":
            return self.bucket  # type: ignore[return-value]  # "auto" as a literal
        with naming("bucket", self.bucket):
            return parse_size(self.bucket)


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(SettingGroup):
    """On which device a run computes, in which precision and memory format.

    Attributes:
        device: "cpu", or "cuda" for the GPU of this rank.
        precision: "fp32"; "bf16" or "fp16": mixed precision, fp16 with a loss scale.
        channels_last: whether images and activations are in channels-last memory format.
        cudnn_benchmark: whether cuDNN measures which of its convolutions is fastest; faster, but results may differ
            in the last bits from run to run.
        compile: backend of torch.compile, such as "inductor"; None: not compiled.
    """

    title: ClassVar[str] = "device and precision"

    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    compile: Annotated[str | None, Metavar("BACKEND")] = None

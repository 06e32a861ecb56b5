"""What a training run is told, checked once; it goes into every checkpoint of the run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasvc.errors import ConfigError
from datasvc.repository.references import check_name
from loaders.augment import AugmentConfig


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        data: data-set reference; resolved once, when the run starts.
        repo: repository URL.
        name: model under which checkpoints are committed.
        model: reference model, see `models.MODELS`.
        cache: folder of the node's cache; None reads the repository directly.
        cache_budget: such as "50GB"; None keeps what the node has.
        peers: nodes to ask before the repository, as `datasvc stage --peers` takes them; "ranks": those of this job,
            each with a server that the job starts; None: nobody.
        epochs: passes over the training split.
        batch_size: samples of one rank per step.
        learning_rate: peak rate, for the global batch.
        momentum: of SGD.
        weight_decay: L2 factor.
        warmup_epochs: epochs of linear warm-up, fractions allowed.
        size: side of the images in pixels.
        resize: evaluation: shorter side before the centre crop; None for size * 256 / 224.
        scale: share of the area that a training window covers.
        ratio: width / height of a training window.
        flip: probability of a horizontal flip.
        seed: of initialisation, order and augmentation.
        shuffle: "global", which needs all of the data in the cache, or "windowed", which streams through a small one.
        lanes: windowed: see `OrderConfig`.
        block: likewise.
        checkpoint_every: steps between checkpoints; the end of the run always commits one.
        resume: "auto" continues the newest version of `name` where there is one; "never" starts anew.
        device: "cpu", or "cuda" for the GPU of this rank.
        profile: file for a trace of the loader's steps, written at the end of each epoch, when where their time went
            is printed as well; of several ranks each has one of its own, `trace.0.json`. None: neither.

    Raises:
        ConfigError: a value is out of range.
    """

    data: str
    repo: str
    name: str
    model: str = "small-cnn"
    cache: str | None = None
    cache_budget: str | None = None
    peers: str | None = None
    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: float = 1.0
    size: int = 224
    resize: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    seed: int = 0
    shuffle: str = "global"
    lanes: int = 1
    block: int | None = None
    checkpoint_every: int = 1000
    resume: str = "auto"
    device: str = "cpu"
    profile: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "checkpoint_every", "size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("learning_rate", "momentum", "weight_decay", "warmup_epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a finite number, not below 0")
        if self.peers is not None and self.cache is None:
            raise ConfigError("peers fill a node's cache: give a folder for it with --cache")
        check_name(self.name, "model")
        AugmentConfig(scale=self.scale, ratio=self.ratio, flip=self.flip)
        if self.shuffle not in ("global", "windowed"):
            raise ConfigError(f"shuffle is {self.shuffle!r}; expected 'global' or 'windowed'")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; expected 'cpu' or 'cuda'")
        if self.profile is not None and not Path(self.profile).absolute().parent.is_dir():
            raise ConfigError(f"profile is {self.profile!r}, and its folder does not exist")
        if self.resume not in ("auto", "never"):
            raise ConfigError(f"resume is {self.resume!r}; expected 'auto' or 'never'")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dataclasses.asdict(self)

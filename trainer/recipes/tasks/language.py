"""The task of language modelling, the prediction of the next token: its loaders, model, loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders import DataRanks, Loader, Mixture, TokenBatch, TokenFormat, TokenLoader
from datasvc.loaders.core.mixture import splits_of, weighted_splits
from datasvc.loaders.tokens.token_loader import common_block
from datasvc.shards import Split
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.groups.training import TEXT_MODEL
from datasvc.trainer.recipes.tasks.classification import order_arguments, refuse_image_settings
from datasvc.trainer.recipes.tasks.task import NO_TARGET, DataPlacement, Examples

_MAX_EXPONENT: Final = 700.0  # the exponential of a larger number can overflow a float64


class LanguageModelling:
    """Learns to predict the next token, by cross entropy over all tokens that have a next token.

    Raises:
        ConfigError: `config.vocabulary` is not set.
    """

    unit: ClassVar[str] = "blocks"
    default_model: ClassVar[str] = TEXT_MODEL
    num_sums: ClassVar[int] = 3
    masks_samples = False
    losses: list[torch.Tensor] | None = None
    targets_vary: ClassVar[bool] = True

    def __init__(self, config: TrainConfig, split: Split | Mixture) -> None:
        if config.vocabulary is None:
            raise ConfigError(
                f"{split!r} holds tokens: set the size of its vocabulary, such as --vocabulary 50257 for GPT-2's"
            )
        refuse_image_settings(config, f"{split!r} holds tokens", "on_bad")
        self._config = config
        self._vocabulary = config.vocabulary

    @property
    def _format(self) -> TokenFormat:
        config = self._config
        return TokenFormat(
            config.token_column,
            block_tokens=config.block_tokens,
            dtype=config.token_dtype,
            pad=config.pad_token,
            end=config.end_token,
        )

    def find_block_tokens(self, split: Split | Mixture) -> int:
        """Return the tokens of a block of a split, from its schema. Raises ConfigError: it does not state them."""
        return common_block(weighted_splits(split), self._format)

    def open_loader(
        self, split: Split | Mixture, *, training: bool, batch_size: int, cache: Cache | None, place: DataPlacement
    ) -> Loader[Any]:
        """Return this rank's loader of a split or mixture."""
        config = self._config
        # The documents of a pack do not belong together.
        documents = config.documents or any(part.packs is not None for part in splits_of(split))
        return TokenLoader(
            split,
            batch_size=batch_size,
            training=training,
            cache=cache,
            tokens=self._format,
            labels="within" if documents else "across",
            documents=documents,
            loss_mask=config.loss_mask,
            **order_arguments(config, training=training),
            ranks=DataRanks(place.rank, place.world_size),
            prefetch=config.prefetch,
            ledger=config.ledger if training else None,
        )

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, with one logit per token of the vocabulary."""
        return build_model(name, self._vocabulary, **options)

    def make_example(self, block: int | None, /) -> Tensor:
        """Return the tokens of one sample, `int64[1, block]` on the meta device."""
        return torch.zeros(1, block or 1, dtype=torch.int64, device="meta")

    def unpack(self, batch: TokenBatch[Tensor], device: torch.device) -> Examples:
        """Return blocks and next tokens, `int64[n, block]` each.

        Raises:
            ConfigError: a token is outside the vocabulary.
        """
        assert batch.labels is not None
        # Checked here, because an embedding on a GPU would fail with an error that names no token.
        largest = int(batch.tokens.max())
        if largest >= self._vocabulary:
            raise ConfigError(
                f"the data has the token {largest}; --vocabulary is {self._vocabulary}, expected more than {largest}"
            )
        extra = {}
        if batch.document_ids is not None and batch.position_ids is not None:
            extra = {"document_ids": batch.document_ids.to(device), "position_ids": batch.position_ids.to(device)}
        return Examples(batch.tokens.to(device), batch.labels.to(device), batch.mask.to(device), extra)

    def count_targets(self, examples: Examples) -> int:
        """Return the number of tokens that have a next token."""
        return int((examples.targets != NO_TARGET).sum())

    def sum_loss(self, model: Callable[..., Any], examples: Examples) -> Tensor:
        """Return the cross entropy of all next tokens; the loss of a block in `losses` is its mean."""
        losses = F.cross_entropy(
            model(examples.inputs, **examples.extra).float().flatten(0, 1),
            examples.targets.flatten(),
            ignore_index=NO_TARGET,
            reduction="sum" if self.losses is None else "none",
            label_smoothing=self._config.label_smoothing,
        )
        if self.losses is not None:
            of_blocks = losses.detach().view(examples.targets.shape).sum(1)
            self.losses.append(of_blocks / (examples.targets != NO_TARGET).sum(1).clamp(min=1))
        return losses.sum()

    def sum_metrics(self, model: Callable[..., Any], examples: Examples) -> Tensor:
        """Return the number of correct tokens, the sum of cross entropies, and the number of tokens."""
        logits = model(examples.inputs, **examples.extra).float()
        counted = (examples.targets != NO_TARGET) & examples.mask[:, None]
        losses = F.cross_entropy(logits[counted], examples.targets[counted], reduction="none")
        right = logits.argmax(-1)[counted] == examples.targets[counted]
        counts = [right.sum(), losses.double().sum(), counted.sum()]
        return torch.stack([count.double().cpu() for count in counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the accuracy in 0..1, the mean cross entropy per token, and the perplexity."""
        right, loss, tokens = cast("list[float]", totals.tolist())
        mean = loss / tokens
        perplexity = math.exp(mean) if mean < _MAX_EXPONENT else math.inf
        return {"val_accuracy": right / tokens, "val_loss": mean, "val_perplexity": perplexity}

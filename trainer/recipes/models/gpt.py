"""GPT: a decoder-only transformer with the architecture of GPT-2.

Sources: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", and Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners".

The input is the token blocks of `TokenLoader`. A block can have several documents; with `document_ids`, a token
attends only to its own document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models.document_attention import (
    DocumentPlan,
    attend_documents,
    mask_documents,
    plan_documents,
)

_DEVIATION = 0.02  # standard deviation of the initial weights
_POSITION_DEVIATION = 0.01  # of the position embedding; from the published code of GPT-2

AttentionMask = torch.Tensor | DocumentPlan | None


class TokenSplit(Protocol):
    """The tokens of each block that this rank computes, if the tokens of a block are divided over ranks.

    Attributes:
        start: position of the first token of this rank in the block.
        size: number of ranks; each has equally many tokens.
    """

    start: int
    size: int

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated along `dim`; gradients flow back to the ranks."""


class GPT(nn.Module):
    """Token and position embeddings, pre-norm transformer blocks, a final norm, and logits of the next token.

    The defaults are a small model: 10.6 million parameters without the embeddings.

    Args:
        num_classes: size of the vocabulary.
        context: largest block in tokens; the number of position embeddings.
        layers: number of transformer blocks.
        heads: attention heads per block.
        width: channels of the residual stream; the MLPs have four times as many.
        dropout: probability of dropout after the embeddings, in the attention, and after attention and MLP (Radford
            et al. 2018, section 4.1).
        tie_weights: whether the logits use the token embedding's weights (Press and Wolf 2017, arXiv:1608.05859).

    Raises:
        ConfigError: a size is below 1, or `width` is not a multiple of `heads`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        context: int = 1024,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        dropout: float = 0.1,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        for name, size in (("context", context), ("layers", layers), ("heads", heads), ("width", width)):
            if size < 1:
                raise ConfigError(f"{name} is {size}; expected at least 1")
        if width % heads:
            raise ConfigError(f"width is {width} and heads is {heads}; expected a width that is a multiple of heads")
        self.context = context
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # With tied weights there is no module for the head, so checkpoints and broadcasts contain the weights once.
        self.head = None if tie_weights else nn.Linear(width, num_classes, bias=False)
        self.token_split: TokenSplit | None = None
        self._initialise()

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the next token at each position.

        The arguments are the fields of `TokenBatch` of the same names.

        Args:
            tokens: `int64[batch, block]`, with `block <= context`; padding must be a token of the vocabulary.
            document_ids: `int32[batch, block]`: a token attends to earlier tokens of the same number. Padding (-1)
                counts as a document: its logits are meaningless, and no other token attends to it. Default: each
                block is one document.
            position_ids: `int64[batch, block]`, below `context`: position of each token; default: its position in
                the block.

        Returns:
            `[batch, block, num_classes]`.

        Raises:
            ConfigError: `tokens` does not have two dimensions, or its blocks are longer than the context.
        """
        if tokens.dim() != 2:
            raise ConfigError(f"tokens have the shape {list(tokens.shape)}; expected [batch, block]")
        num_parts = 1 if self.token_split is None else self.token_split.size
        block = tokens.shape[1] * num_parts
        if block > self.context:
            raise ConfigError(
                f"a block has {block} tokens; expected at most the model's context of {self.context}: "
                f"build the model with context={block}, or use shorter blocks"
            )
        x = _embed(self, tokens, position_ids)
        mask = make_mask(document_ids, tokens.shape[1], self.token_split, tokens.device)
        for layer in self.blocks:
            x = layer(x, mask)
        return _compute_logits(self, x)

    def sizes(self) -> dict[str, int]:
        """Return what a layout must divide: the numbers of `layers` and `heads`, and the `width`."""
        first = self.blocks[0]
        assert isinstance(first, TransformerBlock)
        return {"layers": len(self.blocks), "heads": first.attention.heads, "width": self.tokens.embedding_dim}

    def shard_units(self) -> list[nn.Module]:
        """Return the modules whose parameters are gathered, and whose activations are recomputed, together."""
        return list(self.blocks)

    def tensor_plan(self) -> Mapping[str, str]:
        """Return how layers are divided over ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3), by name.

        Embeddings and normalisations are on every rank.
        """
        return {
            "blocks.*.attention.project": "fused-heads",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.0": "colwise",
            "blocks.*.mlp.2": "rowwise",
        }

    def stage(self, index: int, num_stages: int) -> GPTStage:
        """Return part `index` of the model, which shares its modules; `num_stages` divides the number of layers."""
        return GPTStage(self, index, num_stages)

    def split_tokens(self, split: TokenSplit) -> None:
        """Make the model compute only a part of the tokens of each block; keys and values come from all ranks.

        `tokens` and `position_ids` of `forward` are then those of this rank, `document_ids` those of the whole block.
        """
        self.token_split = split
        for module in self.modules():
            if isinstance(module, Attention):
                module.token_split = split

    def _initialise(self) -> None:
        """Initialise the weights as in the code of GPT-2 and section 2.3 of its paper; biases are 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_DEVIATION)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=_POSITION_DEVIATION)
        # Each block has two residual branches. Scaling the last layer of each branch by 1 / sqrt(num_branches) keeps
        # the variance of the residual stream independent of the depth.
        num_branches = 2 * len(self.blocks)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for last_layer in (block.attention.out, block.mlp[2]):
                assert isinstance(last_layer, nn.Linear)
                nn.init.normal_(last_layer.weight, std=_DEVIATION / math.sqrt(num_branches))


class GPTStage(nn.Module):
    """Successive layers of a GPT: a stage of a pipeline. Parameters have the names that they have in the whole model.

    With tied weights, the first and the last stage both have the token embedding; the sum of their gradients is its
    gradient.

    Args:
        model: whole model, whose modules the stage uses.
        index: number of the stage, 0 <= index < num_stages.
        num_stages: number of stages, which divides the number of layers.
    """

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        num_layers = len(model.blocks) // num_stages
        first, stop = index * num_layers, (index + 1) * num_layers
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.token_split = model.token_split
        if self.is_first or (self.is_last and model.head is None):
            self.tokens = model.tokens
        if self.is_first:
            self.positions = model.positions
            self.dropout = model.dropout
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(first, stop)})
        if self.is_last:
            self.norm = model.norm
            self.head = model.head

    def forward(
        self,
        x: torch.Tensor,
        *,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits from the last stage, `[batch, block, width]` from the others.

        Args:
            x: tokens for the first stage, else the result of the previous one.
            document_ids: see `GPT.forward`.
            position_ids: see `GPT.forward`.
        """
        if self.is_first:
            x = _embed(self, x, position_ids)
        mask = make_mask(document_ids, x.shape[1], self.token_split, x.device)
        for layer in self.blocks.values():
            x = layer(x, mask)
        return _compute_logits(self, x) if self.is_last else x

    def shard_units(self) -> list[nn.Module]:
        """Return the modules whose parameters are gathered, and whose activations are recomputed, together."""
        return list(self.blocks.values())


def _embed(model: GPT | GPTStage, tokens: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    if position_ids is None:
        start = 0 if model.token_split is None else model.token_split.start
        position_ids = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    return model.dropout(model.tokens(tokens) + model.positions(position_ids))  # type: ignore[no-any-return]


def _compute_logits(model: GPT | GPTStage, x: torch.Tensor) -> torch.Tensor:
    return F.linear(model.norm(x), model.tokens.weight if model.head is None else model.head.weight)


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Return `[batch, block, width]` for an input of this shape; for `mask`, see `Attention.forward`."""
        x = x + self.attention(self.attention_norm(x), mask)
        x = x + self.mlp(self.mlp_norm(x))
        return x  # noqa: RET504 - two equal steps


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.head_width = width // heads
        self.token_split: TokenSplit | None = None
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Return `[batch, block, width]` for an input of this shape.

        Args:
            x: normalised residual stream, `[batch, block, width]`.
            mask: the documents, each with causal attention to itself; None: each block is a document. For a part of
                the tokens, `bool[batch or 1, 1, query, key]`: True where the query attends to the key.
        """
        batch, block, _ = x.shape
        # The number of heads follows from the projection, because a rank may compute only some of them.
        heads = self.project(x).view(batch, block, 3, -1, self.head_width)
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, DocumentPlan):
            attended = attend_documents(heads, mask, dropout)
        else:
            query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
            if self.token_split is not None:
                key, value = self.token_split.gather(key, 2), self.token_split.gather(value, 2)
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            ).transpose(1, 2)
        return self.out_dropout(self.out(attended.flatten(2)))  # type: ignore[no-any-return]


def make_mask(
    document_ids: torch.Tensor | None, num_tokens: int, split: TokenSplit | None, device: torch.device
) -> AttentionMask:
    """Return what the tokens of this rank attend to; see `Attention.forward`.

    Args:
        document_ids: documents of whole blocks, `int[batch, block]`; None: each block is one document.
        num_tokens: tokens of a block on this rank.
        split: which tokens these are; None: all.
        device: device of the mask.
    """
    if split is None:
        return None if document_ids is None else plan_documents(document_ids)
    if document_ids is None:
        document_ids = torch.zeros(1, num_tokens * split.size, dtype=torch.int32, device=device)
    return mask_documents(document_ids, start=split.start, num_queries=num_tokens)


def gpt2(num_classes: int, *, context: int = 1024, dropout: float = 0.1, tie_weights: bool = True) -> GPT:
    """Return the smallest GPT-2: 124,439,808 parameters with its vocabulary of 50,257 tokens. Options: see `GPT`."""
    return GPT(num_classes, context=context, layers=12, heads=12, width=768, dropout=dropout, tie_weights=tie_weights)


def gpt2_medium(num_classes: int, *, context: int = 1024, dropout: float = 0.1, tie_weights: bool = True) -> GPT:
    """Return GPT-2-medium: 354,823,168 parameters with its vocabulary of 50,257 tokens. Options: see `GPT`."""
    return GPT(
        num_classes, context=context, layers=24, heads=16, width=1024, dropout=dropout, tie_weights=tie_weights
    )

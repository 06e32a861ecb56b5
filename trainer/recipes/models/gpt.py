"""A decoder-only transformer like GPT-2.

Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training"; Radford et al. 2019, "Language
Models are Unsupervised Multitask Learners".

It reads token blocks as the token loader packs them: several documents in one block, which must not see each other.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from datasvc.errors import ConfigError

_DEVIATION = 0.02  # of all weights but those below
_POSITION_DEVIATION = 0.01  # as in the code that was published with the paper


class GPT(nn.Module):
    """Token and position embeddings, pre-norm blocks of attention and MLP, a last norm, and logits of the next token.

    Args:
        num_classes: tokens of the vocabulary.
        context: longest block, in tokens: so many positions have an embedding.
        layers: blocks of attention and MLP.
        heads: of each attention.
        width: of the residual stream; the MLPs are four times as wide.
        dropout: on embeddings, attention and the ends of both branches (Radford et al. 2018, section 4.1).
        tie_weights: the logits' weights are the token embedding's (Press and Wolf 2017, arXiv:1608.05859).

    Raises:
        ConfigError: a size is below 1, or the heads do not divide the width.
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
            raise ConfigError(f"width is {width} and heads is {heads}; expected a width that the heads divide")
        self.context = context
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # Tied, there is no second module: a checkpoint and a broadcast hold the weights once.
        self.head = None if tie_weights else nn.Linear(width, num_classes, bias=False)
        self._initialise()

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of each next token.

        The arguments are what a `TokenBatch` holds, under the same names. Without `document_ids` a block is one text.

        Args:
            tokens: `int64[batch, block]`, block at most `context`; padding too is a token of the vocabulary.
            document_ids: `int32[batch, block]`: a token attends to earlier ones with its own number. What stands for
                padding, -1, is one more document: its logits mean nothing, and no real token sees it.
            position_ids: `int64[batch, block]`, below `context`: each token's place; None for that in its block.

        Returns:
            `[batch, block, num_classes]`.

        Raises:
            ConfigError: the block is longer than the context, or is none.
        """
        if tokens.dim() != 2:
            raise ConfigError(f"a GPT takes tokens as [batch, block]; these have the shape {list(tokens.shape)}")
        block = tokens.shape[1]
        if block > self.context:
            raise ConfigError(
                f"a block of {block} tokens is longer than the model's context of {self.context}; "
                f"build it with context={block}"
            )
        if position_ids is None:
            position_ids = torch.arange(block, device=tokens.device)
        mask = None if document_ids is None else mask_documents(document_ids)
        x = self.dropout(self.tokens(tokens) + self.positions(position_ids))
        for layer in self.blocks:
            x = layer(x, mask)
        return F.linear(self.norm(x), self.tokens.weight if self.head is None else self.head.weight)

    def _initialise(self) -> None:
        """Draw all weights as GPT-2's code and section 2.3 of its paper say. Biases are 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_DEVIATION)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=_POSITION_DEVIATION)
        # Every branch adds to the residual stream: the more there are, the less each begins with.
        branches = 2 * len(self.blocks)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for end in (block.attention.out, block.mlp[2]):
                assert isinstance(end, nn.Linear)
                nn.init.normal_(end.weight, std=_DEVIATION / math.sqrt(branches))


class TransformerBlock(nn.Module):
    """Attention, then an MLP: each normalises its input and adds to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map `[batch, block, width]` to the same shape; `mask` as `Attention` takes it."""
        x = x + self.attention(self.attention_norm(x), mask)
        x = x + self.mlp(self.mlp_norm(x))
        return x  # noqa: RET504 - two equal steps


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map `[batch, block, width]` to the same shape.

        Args:
            x: the normalised residual stream.
            mask: `bool[batch, 1, block, block]`, which tokens each may see; None for all up to itself.
        """
        batch, block, width = x.shape
        heads = self.project(x).view(batch, block, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        return self.out_dropout(self.out(seen.transpose(1, 2).reshape(batch, block, width)))  # type: ignore[no-any-return]


def mask_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens each may see: those of its own document, up to itself.

    Args:
        document_ids: `int[batch, block]`.

    Returns:
        `bool[batch, 1, block, block]`, True to see; every row sees at least itself, so that no softmax is empty.
    """
    block = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(block, block, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]


def gpt(
    num_classes: int,
    *,
    context: int = 1024,
    layers: int = 6,
    heads: int = 6,
    width: int = 384,
    dropout: float = 0.1,
    tie_weights: bool = True,
) -> GPT:
    """Return a small GPT: 10.6 million parameters beside its embeddings. Options: see `GPT`."""
    return GPT(
        num_classes,
        context=context,
        layers=layers,
        heads=heads,
        width=width,
        dropout=dropout,
        tie_weights=tie_weights,
    )


def gpt2(num_classes: int, *, context: int = 1024, dropout: float = 0.1, tie_weights: bool = True) -> GPT:
    """Return GPT-2's smallest size: 124,439,808 parameters at its vocabulary of 50,257. Options: see `GPT`."""
    return GPT(num_classes, context=context, layers=12, heads=12, width=768, dropout=dropout, tie_weights=tie_weights)

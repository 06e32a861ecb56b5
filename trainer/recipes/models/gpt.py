"""GPT: a decoder-only transformer with the architecture of GPT-2.

Sources: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", and Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners".

The input is the token blocks of `TokenLoader`. A block can have several documents; with `document_ids`, a token
attends only to its own document.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from datasvc.errors import ConfigError

_DEVIATION = 0.02  # standard deviation of the initial weights
_POSITION_DEVIATION = 0.01  # of the position embedding; from the published code of GPT-2


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
        block = tokens.shape[1]
        if block > self.context:
            raise ConfigError(
                f"a block has {block} tokens; expected at most the model's context of {self.context}: "
                f"build the model with context={block}, or use shorter blocks"
            )
        if position_ids is None:
            position_ids = torch.arange(block, device=tokens.device)
        mask = None if document_ids is None else mask_documents(document_ids)
        x = self.dropout(self.tokens(tokens) + self.positions(position_ids))
        for layer in self.blocks:
            x = layer(x, mask)
        return F.linear(self.norm(x), self.tokens.weight if self.head is None else self.head.weight)

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

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return `[batch, block, width]` for an input of this shape; for `mask`, see `Attention.forward`."""
        x = x + self.attention(self.attention_norm(x), mask)
        x = x + self.mlp(self.mlp_norm(x))
        return x  # noqa: RET504 - two equal steps


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return `[batch, block, width]` for an input of this shape.

        Args:
            x: normalised residual stream, `[batch, block, width]`.
            mask: `bool[batch, 1, query, key]`, True where the query attends to the key; None for causal attention.
        """
        batch, block, width = x.shape
        heads = self.project(x).view(batch, block, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        return self.out_dropout(self.out(attended.transpose(1, 2).reshape(batch, block, width)))  # type: ignore[no-any-return]


def mask_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the attention mask in which each token attends to itself and to earlier tokens of its document.

    Args:
        document_ids: `int[batch, block]`.

    Returns:
        `bool[batch, 1, query, key]`, True where the query attends to the key. The diagonal is True, so no softmax is
        over an empty set.
    """
    block = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(block, block, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]


def gpt2(num_classes: int, *, context: int = 1024, dropout: float = 0.1, tie_weights: bool = True) -> GPT:
    """Return the smallest GPT-2: 124,439,808 parameters with its vocabulary of 50,257 tokens. Options: see `GPT`."""
    return GPT(num_classes, context=context, layers=12, heads=12, width=768, dropout=dropout, tie_weights=tie_weights)


def gpt2_medium(num_classes: int, *, context: int = 1024, dropout: float = 0.1, tie_weights: bool = True) -> GPT:
    """Return GPT-2-medium: 354,823,168 parameters with its vocabulary of 50,257 tokens. Options: see `GPT`."""
    return GPT(
        num_classes, context=context, layers=24, heads=16, width=1024, dropout=dropout, tie_weights=tie_weights
    )

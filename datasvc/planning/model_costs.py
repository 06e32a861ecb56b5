"""Costs of a model that decide its memory and its time: parameters, FLOPs and activations, part by part.

A model is a first part (embeddings), `layers` equal blocks, and a last part (norm, logits, loss). A model that is not
divided into equal blocks is one block.

The formulas for a transformer block are those of Narayanan et al. 2021 (arXiv:2104.04473, appendix) for FLOPs, and of
Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for activations, without the attention matrix, which
`scaled_dot_product_attention` does not store. Symbols: s tokens of a block, h channels, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PartCosts:
    """Costs of a part of a model.

    Attributes:
        parameters: number of parameters that each rank of a tensor group holds.
        split_parameters: number of parameters that tensor parallelism divides.
        forward_flops: floating-point operations of the forward pass of a sample. Tensor parallelism divides
            those of blocks.
        kept_elements: activations of a sample that are kept for the backward pass, in the precision of the run, by
            each rank of a tensor group.
        split_elements: the same, for activations that tensor parallelism divides.
        kept_bytes: kept bytes of a sample that do not depend on the precision, such as masks of dropout.
    """

    parameters: int = 0
    split_parameters: int = 0
    forward_flops: float = 0.0
    kept_elements: float = 0.0
    split_elements: float = 0.0
    kept_bytes: float = 0.0

    @property
    def all_parameters(self) -> int:
        """Number of parameters without tensor parallelism."""
        return self.parameters + self.split_parameters

    def parameters_on_rank(self, tensor: int) -> float:
        """Return the number of parameters on a rank of a tensor group of `tensor` ranks."""
        return self.parameters + self.split_parameters / tensor

    def activation_bytes(self, element_bytes: int, tensor: int = 1) -> float:
        """Return the bytes of a sample that a rank of a tensor group keeps for the backward pass."""
        return (self.kept_elements + self.split_elements / tensor) * element_bytes + self.kept_bytes


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model for samples of one shape.

    Attributes:
        name: name of the model.
        unit: name of the samples, in the plural.
        first: part before the blocks.
        block: one block.
        last: part after the blocks, with the loss.
        layers: number of blocks.
        boundary_elements: elements of the output of a block for a sample; pipelines send them.
        heads: attention heads of a block; None if the model has no plan for tensor, pipeline and context parallelism.
        width: channels of the residual stream; None if `heads` is None.
        tokens: tokens of a sample; None for images.
        tied_parameters: parameters of the first part that the last part uses too. If they are on different ranks,
            both have a copy.
    """

    name: str
    unit: str
    first: PartCosts
    block: PartCosts
    last: PartCosts
    layers: int
    boundary_elements: float = 0.0
    heads: int | None = None
    width: int | None = None
    tokens: int | None = None
    tied_parameters: int = 0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"layers is {self.layers}; expected at least 1")

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.first.all_parameters + self.layers * self.block.all_parameters + self.last.all_parameters

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of the forward pass of a sample."""
        return self.first.forward_flops + self.layers * self.block.forward_flops + self.last.forward_flops


def transformer_costs(
    name: str,
    *,
    layers: int,
    heads: int,
    width: int,
    vocabulary: int,
    tokens: int,
    context: int | None = None,
    tied: bool = True,
    dropout: float = 0.0,
) -> ModelCosts:
    """Return the costs of a GPT: pre-norm blocks of attention and an MLP with four times the width.

    `context` is the number of position embeddings, by default `tokens`. If `tied`, the logits use the weights of the
    token embedding. The masks of `dropout` are kept if it is above 0. For the other arguments see `ModelCosts`.
    """
    stream = tokens * width
    logits = tokens * vocabulary
    embedding = vocabulary * width
    first = PartCosts(
        parameters=embedding + (context or tokens) * width,
        kept_elements=stream if dropout else 0,
        kept_bytes=stream if dropout else 0,
    )
    last = PartCosts(
        parameters=2 * width + (0 if tied else embedding),
        forward_flops=2 * tokens * width * vocabulary,
        kept_elements=2 * stream + logits,
        # The log-probabilities of the cross entropy, in float32.
        kept_bytes=FLOAT32_BYTES * logits,
    )
    return ModelCosts(
        name,
        "blocks",
        first,
        _block_costs(tokens, width, dropout),
        last,
        layers,
        boundary_elements=stream,
        heads=heads,
        width=width,
        tokens=tokens,
        tied_parameters=embedding if tied else 0,
    )


def _block_costs(tokens: int, width: int, dropout: float) -> PartCosts:
    stream = tokens * width
    # The tensor group divides the columns of the first and the rows of the second matrix of attention and MLP
    # (Shoeybi et al. 2019). The biases of the second matrices and the norms are on every rank.
    return PartCosts(
        parameters=6 * width,
        split_parameters=12 * width**2 + 7 * width,
        # 24 s h^2 for the matrices, 4 s^2 h for the scores and their product with the values.
        forward_flops=24 * tokens * width**2 + 4 * tokens**2 * width,
        # Inputs of two norms, of the attention's and of the MLP's first matrix.
        kept_elements=4 * stream,
        # Queries, keys, values and attended values; input and output of GELU, each four times as wide.
        split_elements=12 * stream,
        # One byte per element for each of the two masks on the residual stream.
        kept_bytes=2 * stream if dropout else 0,
    )

"""Counts the costs of a model of the registry on torch's meta device, where tensors have shapes and no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from datasvc.errors import ConfigError
from datasvc.planning.model_costs import ModelCosts, PartCosts, transformer_costs
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.models.gpt import GPT, TransformerBlock

_NUM_SAMPLES = 2  # batch normalisation refuses a single value per channel
_CHANNELS = 3


def count_costs(
    name: str, num_classes: int, options: Mapping[str, Any], *, tokens: int | None = None, size: int = 224
) -> ModelCosts:
    """Return the costs of a model.

    Those of a GPT come from its sizes. Every other model is one block, whose costs are counted in a forward pass.

    Args:
        name: a model of the registry, or "module:function".
        num_classes: number of classes, or of tokens of the vocabulary.
        options: options of the model.
        tokens: tokens of a sample; None: the context of a GPT; other models get images.
        size: side of an image, in pixels.

    Raises:
        ConfigError: there is no such model, or it does not take these options or samples.
    """
    with torch.device("meta"):
        model = build_model(name, num_classes, **options)
    if isinstance(model, GPT):
        return _costs_of_gpt(name, model, tokens)
    shape = (_CHANNELS, size, size) if tokens is None else (tokens,)
    dtype = torch.float32 if tokens is None else torch.int64
    samples = torch.zeros(_NUM_SAMPLES, *shape, dtype=dtype, device="meta")
    try:
        flops, kept = run_forward(model, samples)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"model {name!r} does not take samples of shape {list(shape)} on torch's meta device: {error}; set "
            "--size for images, --vocabulary and --block-tokens for tokens"
        ) from error
    block = PartCosts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward_flops=flops / _NUM_SAMPLES,
        kept_elements=kept / _NUM_SAMPLES,
    )
    unit = "images" if tokens is None else "blocks"
    return ModelCosts(name, unit, PartCosts(), block, PartCosts(), layers=1, tokens=tokens)


def _costs_of_gpt(name: str, model: GPT, tokens: int | None) -> ModelCosts:
    tokens = tokens or model.context
    if tokens > model.context:
        raise ConfigError(
            f"--block-tokens is {tokens}; expected at most the model's context of {model.context}: "
            f"give --model-option context={tokens}"
        )
    block = model.blocks[0]
    assert isinstance(block, TransformerBlock)
    vocabulary, width = model.tokens.weight.shape
    return transformer_costs(
        name,
        layers=len(model.blocks),
        heads=block.attention.heads,
        width=width,
        vocabulary=vocabulary,
        tokens=tokens,
        context=model.context,
        tied=model.head is None,
        dropout=model.dropout.p,
    )


def run_forward(model: nn.Module, samples: torch.Tensor) -> tuple[int, int]:
    """Return the FLOPs of a forward pass, and the number of elements that it keeps for the backward pass."""
    kept: dict[StorageWeakRef, int] = {}  # elements by storage: views of one storage count once
    parameters = {_identify_storage(parameter) for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = _identify_storage(tensor)
        if storage not in parameters:
            kept[storage] = max(kept.get(storage, 0), tensor.numel())
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(samples)
    return counter.get_total_flops(), sum(kept.values())


def _identify_storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

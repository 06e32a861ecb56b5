"""Transforms that workers import: what a user's module has."""

import random

import numpy as np
import torch


def draw_everywhere(sample, generator):
    """Return a sample's key with a number of every generator that a transform may use."""
    own, numpys = generator.random(), np.random.random()  # noqa: NPY002
    drawn = torch.tensor([own, torch.rand(()).item(), numpys, random.random()], dtype=torch.float64)
    return {"key": sample["key"], "drawn": drawn, "mask": sample.get("mask", True)}


def flip_and_tint(sample, generator):
    """Return (pixels, label) of a sample decoded to numpy: `float32[3, height, width]`."""
    pixels = sample["image"]
    if generator.random() < 0.5:
        pixels = pixels[:, ::-1]
    tinted = pixels.astype(np.float32) * generator.uniform(0.8, 1.2, 3).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(tinted.transpose(2, 0, 1))), sample["label"]

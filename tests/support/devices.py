"""The devices that a test runs on: its logic is proven on the CPU, and on a GPU where there is one."""

import pytest
import torch

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
)
CUDA = pytest.param("cuda", marks=NEEDS_GPU)
DEVICES = ("cpu", CUDA)


def on_gpu(test):
    """Mark a test that says nothing on a CPU."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test

"""Backends with a GPU: decoding on the GPU, or on the CPU with an upload."""

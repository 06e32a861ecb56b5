"""Backends that deliver images on a GPU: decoded there, or decoded on the CPU and copied."""

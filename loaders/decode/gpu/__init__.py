"""Decodes on a GPU, or uploads to it what the CPU decoded."""

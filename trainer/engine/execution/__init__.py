"""Runs agreed operations over torch.distributed."""

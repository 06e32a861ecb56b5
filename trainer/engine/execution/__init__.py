"""Execution of agreed operations over torch.distributed."""

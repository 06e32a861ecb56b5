"""Layouts: which rank holds which part of the model and of the batches."""

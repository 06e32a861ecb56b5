"""Gradients on their way between ranks: buckets, compression, reduction."""

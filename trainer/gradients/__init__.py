"""Reduction of gradients over the ranks: buckets, compression, sparse gradients."""

"""Reads a model version back, verified, from a repository, its copies or a node's cache."""

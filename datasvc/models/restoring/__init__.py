"""Restores model versions, every byte verified: from a repository, its copies or a node's cache."""

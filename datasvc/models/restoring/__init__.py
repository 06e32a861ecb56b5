"""Restores model versions from a repository, copies of it, or a node's cache, and verifies every byte."""

"""Reads objects from other nodes: who the nodes are, which of them owns an object, which of them are healthy."""

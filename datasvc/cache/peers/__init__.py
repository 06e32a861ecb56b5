"""Reads objects from other nodes: the list of nodes, the owner of each object, and the health of each peer."""

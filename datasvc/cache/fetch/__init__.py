"""Brings one object onto the node: reserve, transfer, verify, publish."""

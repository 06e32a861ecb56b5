"""Fetches one object onto the node: reserve, transfer, verify, publish."""

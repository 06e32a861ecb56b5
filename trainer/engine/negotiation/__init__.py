"""Negotiation between the ranks: which operations are ready, and in which order they run. Pure."""

"""Negotiation between the ranks: which operations are ready, and in which order they run. Does no input or output."""

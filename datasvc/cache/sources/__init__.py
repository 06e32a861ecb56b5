"""Reads objects from their permanent stores: an origin, by parallel ranged requests, or a remote file."""

"""Predicts hits and traffic of a cache before a run starts, by simulation. Pure."""

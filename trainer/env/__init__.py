"""Reads the environment: launcher variables, Slurm, GPUs, engine settings."""

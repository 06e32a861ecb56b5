"""The environment of a rank: placement variables of launchers and Slurm, engine settings, GPUs."""

"""Source of numpy arrays: `.npy` and `.npz`."""

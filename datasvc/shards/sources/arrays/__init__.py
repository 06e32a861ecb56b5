"""numpy arrays as a source: `.npy` and `.npz`."""

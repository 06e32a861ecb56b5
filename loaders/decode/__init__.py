"""Decoding of windows (crops) of images into batches of pixels, in CPU threads or with DALI on a GPU."""

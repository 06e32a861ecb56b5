"""Access to the files of a store over fsspec, with retries, ranged reads and create-only writes."""

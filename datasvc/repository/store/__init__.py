"""Reads and writes files of a store: fsspec behind a few calls, with retries, ranged reads and create-only writes."""

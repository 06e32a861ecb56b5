"""Versions of data sets: open, compare, verify, and commit changed ones (delete, append, merge, name classes)."""

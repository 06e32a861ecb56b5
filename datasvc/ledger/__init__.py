"""The ledger: the files in which each rank of a run records the positions it served, and the audit of these files."""

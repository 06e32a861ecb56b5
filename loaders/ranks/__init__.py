"""The data rank of a process, and decisions of data rank 0 that all ranks follow."""

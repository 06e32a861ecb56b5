"""Keeps versions on the disks of the nodes, beside those of the repository: the folder, its lock, and the plans."""

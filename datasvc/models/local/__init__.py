"""Keeps versions on the disks of the nodes, beside those of the repository: the folder of a node, and the copies."""

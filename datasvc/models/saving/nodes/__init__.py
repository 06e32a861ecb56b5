"""Saves and restores versions on the disks of the nodes, by all ranks together."""

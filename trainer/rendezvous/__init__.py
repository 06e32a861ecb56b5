"""Rendezvous of the ranks of a job: rank assignment, messages to the driver, detection of missing ranks."""

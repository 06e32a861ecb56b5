"""Starts, watches and ends the processes of a job, on this host and others."""

"""The processes of a job: start, output, signals and termination, on this host and on others."""

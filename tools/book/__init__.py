"""Builds the documentation site from `docs/`, the command line and the public names of the Python packages."""

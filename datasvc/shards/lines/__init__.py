"""The lines of a data set, its main line and its branches: what a commit continues, ancestors, newest versions."""

"""The lines of a data set, which are its main line and its branches: what a commit continues, common ancestors,
and the newest version of each data set."""
